"""A device that is not there, for what only a GPU would find: tensors on `meta` have shapes and no
values, so whatever reads one, or forgets to make a tensor on the device of its inputs, fails.
"""

import contextlib
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Elsewhere(TorchDispatchMode):
    """Refuses operations between tensors of two devices, as CUDA does (a CPU number without
    dimensions is allowed there too), and counts copies to the device in `arrivals`."""

    def __init__(self):
        super().__init__()
        self.arrivals = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten._to_copy.default:
            self.arrivals += made.device.type == "meta" and given[0].device.type == "cpu"
        elif {"cpu", "meta"} == {t.device.type for t in given if t.dim() or t.is_meta}:
            raise AssertionError(f"{operation} meets tensors of two devices")
        return made


@contextlib.contextmanager
def elsewhere():
    """Yields the mode and a list of the shapes of what was read with `tolist`, the documented
    transfer of the losses, which reads zeros. Adam has no fused kernel there: the plain one steps.
    """
    read, tolist, adam = [], torch.Tensor.tolist, torch.optim.Adam

    def read_zeros(tensor):
        if not tensor.is_meta:
            return tolist(tensor)
        read.append(tuple(tensor.shape))
        return [0.0] * len(tensor)

    class PlainAdam(adam):
        def __init__(self, *args, fused=None, **kwargs):
            super().__init__(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "tolist", read_zeros))
        stack.enter_context(patch.object(torch.optim, "Adam", PlainAdam))
        yield stack.enter_context(Elsewhere()), read
