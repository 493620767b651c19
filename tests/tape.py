"""A stand-in for CUDA's graphs on the CPU: it records the operations of an update and plays them
again on the same tensors. As on a GPU, whatever Python worked out meanwhile stays as it was."""

import contextlib
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hmoe_repro.algorithms import recorded_updates


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def alias(tree):
    "The same with other tensors over the same memory."
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, tree)


RESHAPING = (torch.ops.aten.squeeze_.dim, torch.ops.aten.unsqueeze_.default)  # move no number


class Tape(TorchDispatchMode):
    "In place of torch.cuda.CUDAGraph."

    def __init__(self):
        super().__init__()
        self.played, self.steps = 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        seen = alias((args, kwargs or {}))  # with the shapes they have now
        made = operation(*args, **(kwargs or {}))
        if operation not in RESHAPING:
            self.steps.append((operation, *seen, alias(made)))
        return made

    @torch.no_grad()
    def replay(self):
        self.played += 1
        for operation, args, kwargs, made in self.steps:
            for old, new in zip(tensors(made), tensors(operation(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def taped(algorithm):
    "While the body runs, the algorithm's updates can be recorded here. Yields the tapes."
    tapes = []

    @contextlib.contextmanager
    def record(tape, stream=None):
        held = tensors([algorithm.state_dict(keep_vars=True), dict(algorithm.optimizer.state)])
        before = [t.detach().clone() for t in held]
        with tape:
            yield
        tapes.append(tape)
        with torch.no_grad():  # recording computes nothing
            for tensor, value in zip(held, before):
                tensor.copy_(value)

    class Stream:
        def __init__(self, *device):
            pass

        def wait_stream(self, other):
            pass

    why_not_recordable = recorded_updates.why_not_recordable
    replaced = {
        "CUDAGraph": Tape,
        "graph": record,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(
            patch.object(
                recorded_updates,
                "why_not_recordable",
                lambda algorithm, device: why_not_recordable(algorithm, "cuda"),
            )
        )
        yield tapes
