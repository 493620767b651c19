"""Kernels that start at once: one process imports the large libraries and forks a kernel for each
notebook.

A fresh kernel spends three to six seconds on importing PyTorch, pandas and scikit-learn, and the
tests start more than a hundred. Here a server does so once, and what Jupyter starts as `python3` is
a small script that asks the server to fork. The child takes over environment, folder, module path
and streams, and is a kernel like any other from there on: the library itself is never imported
before the fork.

    python warm_kernels.py serve SOCKET              forks until its standard input closes
    python -IS warm_kernels.py SOCKET ARGUMENTS...   stands in for
                                                     `python -m ipykernel_launcher ARGUMENTS...`

What a library reads of the environment when it is imported cannot be taken over: where such a
variable differs from the server's, the stand-in becomes an ordinary kernel. Variables that the
libraries set themselves (scikit-learn sets two) may be there or not.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys

PRELOADED = (
    "numpy",
    "pandas",
    "torch",
    "torch._dynamo",
    "matplotlib.pyplot",
    "seaborn",
    "PIL.Image",
    "sklearn.datasets",
    "sklearn.manifold",
    "sklearn.metrics",
    "sklearn.neighbors",
    "safetensors.torch",
    "rich.progress",
    "typer.testing",
    "ipykernel.kernelapp",
)
READ_AT_IMPORT = (
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "TORCH_",
    "TORCHDYNAMO_",
    "PYTHONHASHSEED",
)
INLINE = "module://matplotlib_inline.backend_inline"


def read_at_import(environment):
    "The variables that libraries read when they are imported."
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


def become_a_kernel(request, streams):
    "Take over what the stand-in was started with, and run a kernel until it is shut down."
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    own = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = given + [p for p in sys.path[1:] if p not in own]
    sys.argv[:] = ["ipykernel_launcher", *request["arguments"]]

    import tempfile

    import matplotlib
    import numpy
    import torch
    from ipykernel.kernelapp import IPKernelApp

    tempfile.tempdir = None  # looked up once in a process
    matplotlib.rcParams["backend"] = os.environ.get("MPLBACKEND", INLINE)
    numpy.random.seed(), torch.seed()  # as every new process does
    # parent_handle=1: the server ends this kernel, so it need not look after its parent.
    IPKernelApp.launch_instance(request["arguments"], parent_handle=1)


def fork(request, streams):
    "Fork a kernel; returns its process number. The child never returns."
    if child := os.fork():
        return child
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become_a_kernel(request, streams)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import atexit

        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def serve(path):
    "Import, listen, fork and bury, until standard input closes."
    import importlib

    own = read_at_import(os.environ)  # before the libraries add to it
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with_theirs = read_at_import(os.environ)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready, children = selectors.DefaultSelector(), {}
    for source in (listener, wake, sys.stdin.buffer):
        ready.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin.buffer:
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                os._exit(0)  # at once: taking the libraries down again takes seconds
            if key.fileobj is listener:
                caller, _ = listener.accept()
                message, streams, *_ = socket.recv_fds(caller, 1 << 20, 3)
                while not message.endswith(b"\n"):
                    message += caller.recv(1 << 20)
                request = json.loads(message)
                wanted = read_at_import(request["environment"])
                if own.items() <= wanted.items() <= with_theirs.items():
                    children[child := fork(request, streams)] = caller
                    caller.sendall(f"{child}\n".encode())
                    ready.register(caller, selectors.EVENT_READ, child)
                else:
                    caller.close()
                for stream in streams:
                    os.close(stream)
            elif key.fileobj is wake:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                for child in list(children):
                    ended, status = os.waitpid(child, os.WNOHANG)
                    if ended:
                        caller = children.pop(child)
                        with contextlib.suppress(OSError, KeyError):
                            ready.unregister(caller)
                            caller.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                        caller.close()
            elif key.data in children:  # the stand-in is gone, killed perhaps
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
                ready.unregister(key.fileobj)


def stand_in(path, arguments):
    "Ask for a kernel, pass signals on to it, and end as it ends."
    request = {"environment": dict(os.environ), "folder": os.getcwd(), "arguments": arguments}
    message, child = json.dumps(request).encode() + b"\n", ""
    server = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        server.connect(path)
        sent = socket.send_fds(server, [message], [0, 1, 2])
        if sent < len(message):
            server.sendall(message[sent:])
        answers = server.makefile()
        child = answers.readline()
    if not child:
        os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", *arguments])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: os.kill(int(child), n))
    status = int(answers.readline() or 1)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        stand_in(sys.argv[1], sys.argv[2:])
