"""Run a test's body on a device: ``DTLIB_TEST_DEVICE=cuda python -m pytest tests/test_parity.py``, or ``fake``.

What the test creates, modules included, is created on the device. What dtlib creates outside a module's ``__init__`` is
left as it is, so a tensor that dtlib makes on the default device is noticed. Random values are drawn on the CPU.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from dtlib.comm import types

DEVICE = os.environ.get("DTLIB_TEST_DEVICE")
RANDOM = {torch.randn, torch.rand, torch.randint, torch.randperm, torch.normal}
CREATES = {*_device_constructors(), *RANDOM}


class OnDevice(TorchFunctionMode):
    """Tensors that tests and modules create are created on ``device``."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function not in CREATES or kwargs.get("device") is not None or _made_by_dtlib(sys._getframe(1)):
            return function(*args, **kwargs)
        if function not in RANDOM:
            return function(*args, **{**kwargs, "device": self._device})
        tracked = kwargs.pop("requires_grad", False)
        return function(*args, **kwargs).to(self._device).requires_grad_(tracked)


def _made_by_dtlib(frame) -> bool:
    """True if dtlib's code asks for the tensor, outside the ``__init__`` of a module."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("tests.", "benchmarks.")):
            return False
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return False
        if module.startswith("dtlib.") and frame.f_code.co_name != "__torch_function__":  # a mode passes calls on
            return True
        frame = frame.f_back
    return False


def of_one_process(compute):
    """What one process computes, to compare with it: beside a fake GPU, which is slow, the CPU computes it."""

    @cache
    def computed(*arguments):
        if DEVICE != "fake":
            return compute(*arguments)
        with torch.device("cpu"):
            found = compute(*arguments)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch.zeros(0).device), found)

    return computed


@contextmanager
def on_device(world) -> Iterator[None]:
    """Run a block where ``DTLIB_TEST_DEVICE`` says: on the rank's own device, on a fake GPU, or as usual without it."""
    if not DEVICE:
        yield
        return
    if DEVICE != "fake":
        torch.backends.cudnn.allow_tf32 = False  # products in TF32 are no float32
        with OnDevice(world.device):
            yield
        return
    from tests.fake_gpu import GPU, fake_gpu

    staged, device = patch.object(types, "STAGED", (GPU.type,)), patch.dict(world.__dict__, device=GPU)
    with staged, device, fake_gpu(), OnDevice(GPU):
        yield
