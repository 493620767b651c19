"""Train on a GPU that is available for minutes: steps that stop in time and resume later.

    python .ci/gpu.py prepare                            here: write the inputs to .gpu/in
    python .ci/gpu.py check colored --minutes 9          there: steps, in this order, for 9 minutes
    python .ci/gpu.py all --minutes 600                  or, on your own GPU, everything

    check       compare the GPU's losses with the CPU's
    colored     Table 4: ERM, HMOE-DL, -DN and -ND on ColoredMNIST
    rotated     Table 5: ERM, HMOE-DL and -DN on RotatedMNIST
    baselines   Table 1: the other 13 algorithms, on ColoredMNIST first
    speed       time and memory of eight algorithms, as in GMoE's Table 16

It needs Python 3.11 or newer, PyTorch and the library's own dependencies; no network, no notebook
tools and no home folder; `check` needs pytest. It works in .gpu and leaves in --out (or OUT, or
.gpu/out) gpu.json, gpu.log and archives of at most --mib, --files files in all, for `hmoe unpack`.
Runs that a step did not finish stay in .gpu/runs and are resumed when it is called again; if the
machine is not kept, their checkpoints are in the archives, as far as they fit: unpack, `prepare`
again, resume there.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("check", "colored", "rotated", "baselines", "speed")
TRAIN = {"colored": "hmoe_table4", "rotated": "hmoe_table5", "baselines": "hmoe_table1"}
LAST = 30  # seconds kept back for packing
CACHES = {
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "cache",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "HF_HOME": "hf",
    "HMOE_CACHE": "images",
}


def set_environment(work, home=False):
    "Keep all files below `work`; with `home`, use the usual folders of runs and data."
    for name, folder in CACHES.items():
        os.environ[name] = str(work / "cache" / folder)
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ |= {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    for name, value in (("HOME", str(work)), ("USER", "nobody")):
        os.environ.setdefault(name, value)
    if not home:
        os.environ["HMOE_RUNS"] = str(work / "runs")
        if (work / "data" / "MNIST").exists():
            os.environ["HMOE_DATA"] = str(work / "data")
        if (work / "in" / "commit").exists():
            os.environ.setdefault("HMOE_COMMIT", (work / "in" / "commit").read_text().strip())
    sys.path.insert(0, str(ROOT))


def pack_parts(store, folder, name, runs, limit, **options):
    """Pack runs as `<folder>/<name>-1.tar.gz`, `-2` and so on, each of at most `limit` bytes where
    it holds more than one run: an archive that is too large is packed again as two halves.
    `options`: as for `pack`. Returns the paths."""
    from hmoe_repro.studies.export_import import pack

    parts, waiting = [], [list(runs)]
    while waiting:
        ids, path = waiting.pop(0), Path(folder) / f"{name}-{len(parts) + 1}.tar.gz"
        pack(store, path, runs=ids, **options)
        if len(ids) > 1 and path.stat().st_size > limit:
            path.unlink()
            half = len(ids) // 2
            waiting = [ids[:half], ids[half:], *waiting]
        else:
            parts.append(path)
    return parts


# Here: the inputs


def page_of(profile, step):
    "The page whose studies a step trains; smoke has the digits in place of MNIST's baselines."
    return "digits_table1" if (profile, step) == ("smoke", "baselines") else TRAIN[step]


def ids_of(profile, step):
    "Ids of the runs of a step, in the order in which they are trained."
    from hmoe_repro.studies.artefacts import artefact_studies
    from hmoe_repro.studies.studies import study_specs

    studies = artefact_studies(page_of(profile, step), profile)
    return list(dict.fromkeys(s.run_id for study in studies for s in study_specs(study)))


def prepare(options):
    "Write MNIST, the commit, existing records (not to be trained again) and checkpoints."
    from hmoe_repro.core.environment import git_commit
    from hmoe_repro.data.mnist import mnist_files, verify_mnist
    from hmoe_repro.training.store import RunStore

    folder = options.work / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if options.profile == "paper":
        verify_mnist()
        with tarfile.open(folder / "mnist.tar.xz", "w:xz") as archive:
            for path in mnist_files().values():
                archive.add(path, f"MNIST/raw/{path.name}")
    (folder / "commit").write_text(git_commit() or "")
    store = RunStore()
    known = dict.fromkeys(i for step in TRAIN for i in ids_of(options.profile, step))
    known = [i for i in known if store.path(i).is_dir()]
    done = [i for i in known if store.record_path(i).exists()]
    begun = [i for i in known if (store.path(i) / "state.safetensors").exists() and i not in done]
    if done:
        pack_parts(store, folder, "records", done, int(options.mib * 2**20), arrays=False)
    if begun:
        pack_parts(store, folder, "states", begun, int(options.mib * 2**20))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{len(done)} finished and {len(begun)} unfinished runs included; copy {folder}")


# There: unpack the inputs


def unpack_in(work):
    "Unpack the files of `prepare`, each once, so that a run resumed since is not overwritten."
    from hmoe_repro.studies.export_import import unpack
    from hmoe_repro.training.store import RunStore

    said, marks, store = [], work / "unpacked", RunStore()
    marks.mkdir(parents=True, exist_ok=True)
    before = {path.parent.name for path in store.folder.glob("*/record.json")}
    for path in sorted((work / "in").glob("*.tar.*")):
        mark = marks / hashlib.sha256(path.read_bytes()).hexdigest()
        if mark.exists():
            continue
        if path.name.startswith("mnist"):
            with tarfile.open(path) as archive:
                archive.extractall(work / "data", filter="data")
            os.environ["HMOE_DATA"] = str(work / "data")
        else:
            said.append(f"{path.name}: {unpack(store, path)}")
        mark.touch()
    came = {path.parent.name for path in store.folder.glob("*/record.json")} - before
    with open(work / "came", "a") as file:
        file.writelines(f"{i}\n" for i in sorted(came))
    return said


# There: the steps. Each takes options and the remaining seconds, and returns plain JSON


def run_check(options, seconds):
    "The tests that are marked `cuda`: the GPU against the CPU, and against itself."
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "cuda", "-p", "no:cacheprovider"]
    status = call([*command, str(ROOT / "tests" / "test_cuda.py")], seconds)
    return {"ok": status == 0, "pytest": status}


def run_training(options, seconds, step):
    "`hmoe sweep` for the remaining time."
    command = [sys.executable, "-m", "hmoe_repro.cli.app", "sweep", page_of(options.profile, step)]
    command += ["--profile", options.profile, "--device", options.device]
    command += ["--minutes", f"{seconds / 60:.3f}"]
    if options.jobs:
        command += ["--jobs", str(options.jobs)]
    status = call(command, seconds + LAST / 2)
    return {"ok": status == 0, "status": status, **bring_home(options, step)}


def run_speed(options, seconds):
    "`hmoe bench --what algorithms`, at the paper's batch."
    scale = "tiny" if options.profile == "smoke" else "gpu"
    command = [sys.executable, "-m", "hmoe_repro.cli.app", "bench", "--what", "algorithms"]
    status = call([*command, "--scale", scale, "--device", options.device], seconds)
    return {"ok": status == 0, "status": status}


# There: the outputs


def furthest(store, ids, most):
    "The unfinished runs with the most updates whose checkpoints fit into `most` bytes."
    from hmoe_repro.training.checkpoint_io import load_state

    steps = {i: load_state(store.path(i) / "state.safetensors")["trainer"]["step"] for i in ids}
    chosen = []
    for run_id in sorted(ids, key=lambda i: -steps[i]):
        most -= sum(path.stat().st_size for path in store.path(run_id).iterdir())
        if most < 0:
            break
        chosen.append(run_id)
    return chosen


def bring_home(options, step):
    """Write archives of all records of a step that were made here and not yet packed by this call,
    and of the checkpoints of unfinished runs, within the limit of files."""
    from hmoe_repro.training.store import RunStore

    store, ids, limit = RunStore(), ids_of(options.profile, step), int(options.mib * 2**20)
    known = {*(options.work / "came").read_text().split(), *options.packed}
    new = [i for i in ids if store.record_path(i).exists() and i not in known]
    begun = [
        i
        for i in ids
        if not store.record_path(i).exists() and (store.path(i) / "state.safetensors").exists()
    ]
    for name in (step, "states"):
        for old in options.out.glob(f"{name}-*.tar.gz"):
            old.unlink()
    if new:
        pack_parts(store, options.out, step, new, limit)
    options.packed += new
    room = options.files - 2 - len(list(options.out.glob("*.tar.gz")))
    chosen = furthest(store, begun, max(0, room) * limit)
    states = pack_parts(store, options.out, "states", chosen, limit) if chosen else []
    small = [path for path in states if path.stat().st_size <= limit]
    for path in {*states} - {*small[: max(0, room)]}:
        path.unlink()
    kept = sum(path.exists() for path in states)
    complete = sum(
        json.loads(store.record_path(i).read_text())["status"] == "complete"
        for i in ids
        if store.record_path(i).exists()
    )
    say(
        f"{complete} of {len(ids)} runs of {step} complete, {len(new)} packed; "
        f"{len(begun)} unfinished, of which at most {len(chosen)} in {kept} archives"
    )
    return {
        "runs": len(ids),
        "complete": complete,
        "packed": len(new),
        "half_done": len(begun),
        "state_parcels": kept,
    }


def say(line):
    "Print a line, and append it to gpu.log."
    print(line, flush=True)
    with open(LOG, "a") as log:
        log.write(line + "\n")


def call(command, seconds):
    "Run a command, copying its output to gpu.log; returns its status, or 'out of time'."
    import threading

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        late = threading.Timer(max(1, seconds), child.terminate)
        late.start()
        for line in child.stdout:
            say(line.rstrip())
        status = child.wait()
        late.cancel()
    return "out of time" if status == -15 else status


def perform(options, step, seconds):
    "Run one step; an error does not stop the others."
    from hmoe_repro.core.errors import HmoeError

    say(f"== {step}, {seconds:.0f} s")
    try:
        if step in TRAIN:
            return run_training(options, seconds, step)
        return (run_check if step == "check" else run_speed)(options, seconds)
    except HmoeError as error:
        reason = str(error)
    except Exception as error:
        import traceback

        say(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
    say(f"{step} failed: {reason}")
    return {"ok": False, "reason": reason}


def main():
    global LOG
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="+", choices=("prepare", "all", *STEPS), metavar="STEP")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps of this call")
    parser.add_argument("--out", type=Path, default=None, help="folder of the outputs")
    parser.add_argument("--work", type=Path, default=ROOT / ".gpu", help="folder to work in")
    parser.add_argument("--profile", choices=("paper", "smoke"), default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=None, help="concurrent runs")
    parser.add_argument("--files", type=int, default=8, help="most files in --out")
    parser.add_argument("--mib", type=float, default=16, help="most MiB of each of them")
    options = parser.parse_args()
    begun, options.work = time.monotonic(), options.work.absolute()
    home = options.steps == ["prepare"]
    set_environment(options.work, home)
    if home:
        return prepare(options)
    options.packed = []
    options.out = (options.out or Path(os.environ.get("OUT") or options.work / "out")).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    LOG = options.out / "gpu.log"
    for line in unpack_in(options.work):
        say(line)
    from hmoe_repro.core.devices import resolve_device
    from hmoe_repro.core.environment import environment

    options.device = str(resolve_device(options.device))
    path, asked = options.out / "gpu.json", STEPS if "all" in options.steps else options.steps
    before = json.loads(path.read_text())["steps"] if path.exists() else {}
    report = {
        "environment": environment(options.device),
        "profile": options.profile,
        "steps": before,
    }
    for step in asked:
        left, started = options.minutes * 60 - (time.monotonic() - begun) - LAST, time.monotonic()
        if left <= 0:
            done = {"ok": False, "reason": "the time was up"}
        else:
            done = perform(options, step, left)
        report["steps"][step] = done | {"seconds": round(time.monotonic() - started, 1)}
        path.write_text(json.dumps(report, indent=1))
    say(f"{time.monotonic() - begun:.0f} s in all; outputs: {options.out}")
    sys.exit(0 if all(report["steps"][step]["ok"] for step in asked) else 1)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        if type(error).__name__ != "HmoeError":
            raise
        sys.exit(f"gpu.py: {error}")
