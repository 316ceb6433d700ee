"""A GPU that is not there: ``with fake_gpu():`` computes tensors of a device on the CPU, with a GPU's rules.

The device is torch's ``privateuseone`` under the name ``fakegpu``. Its tensors say that they are a GPU's
(``is_cuda``), so dtlib takes the same way as with a GPU. Noticed are:

- a CPU tensor and one of the device in one operation, ``numpy()`` of a tensor on the device, and any call of
  ``torch.cuda`` that needs CUDA and is not below;
- a copy that nobody waits for: ``non_blocking`` copies to or from pinned memory write garbage first, and values when
  somebody synchronizes with their stream;
- a copy on a second stream that does not wait for the stream that computes the tensor: it copies garbage;
- pinned memory that a program requests before it asks whether there is a GPU (``pinned`` counts requests).

    DTLIB_TEST_DEVICE=fake python -m pytest tests/test_parity.py
"""

import contextlib
import threading
import types as kinds
from functools import cache
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from dtlib.gradients.local_gradient import FreedGradient


class BackendModule(_DummyBackendModule):
    """``torch.fakegpu``, as activation checkpointing needs it."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend("fakegpu", backend_module=BackendModule())
aten, CPU, GPU = torch.ops.aten, torch.device("cpu"), torch.device("fakegpu", 0)
# They take numbers and indices that are on the CPU.
TAKE_THE_CPU = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class DeviceTensor(torch.Tensor):
    """A tensor whose memory is the CPU's, and which says that it is on a GPU."""

    is_cuda = True

    @staticmethod
    def __new__(cls, real):
        made = torch.Tensor._make_subclass(cls, real, False, dispatch_device=True, device_for_backend_keys=GPU)
        made.sparse = None if real.layout == torch.strided else real  # which has no memory to be found by
        return made

    def as_subclass(self, kind):
        return with_kind(kind)(real(self))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, dict(kwargs or {}))

    def __repr__(self, **_):
        return f"{self.cpu()} on {GPU}"

    def __reduce_ex__(self, protocol):
        return DeviceTensor, (real(self).clone(),)

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, spec):
        return self.item().__format__(spec) if self.dim() == 0 else repr(self)

    __torch_function__ = torch._C._disabled_torch_function_impl


@cache
def with_kind(kind):
    """A class of tensors of the device that is also ``kind``."""
    if kind is torch.Tensor or issubclass(kind, DeviceTensor):
        return DeviceTensor if kind is torch.Tensor else kind
    return type(kind.__name__, (kind, DeviceTensor), {"__torch_dispatch__": DeviceTensor.__torch_dispatch__})


def placeholder(kind, parameter):
    """``FreedGradient.like`` on the device."""
    return with_kind(kind)(
        torch.sparse_coo_tensor(size=parameter.shape, dtype=parameter.dtype, device=CPU, check_invariants=True)
    )


class FakeGPU(TorchDispatchMode):
    """Catches what creates tensors on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, dict(kwargs or {}))


class FromNumbers(TorchFunctionMode):
    """``torch.tensor`` hides its copy to the device from every mode: make that copy here."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        if function is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            kwargs.setdefault("dtype", args[0].dtype)
            function, args, asked = torch.tensor, args[1:], GPU
        if function not in (torch.tensor, torch.as_tensor) or asked is None or torch.device(asked).type != GPU.type:
            return function(*args, **kwargs)
        tracked = kwargs.pop("requires_grad", False)
        return function(*args, **{**kwargs, "device": CPU}).to(asked).requires_grad_(tracked)


def real(tensor):
    """The memory of a tensor of the device, as a tensor on the CPU."""
    if tensor.sparse is not None:
        return tensor.sparse
    out = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return out.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def run(function, args, kwargs):
    if function is torch.ops.prim.device.default:
        return GPU
    asked = kwargs.get("device")
    asked = asked and torch.device(asked)
    if kwargs.pop("pin_memory", None):
        pinned.append(function)
        out = run(function, args, kwargs)
        _pinned.add(out.untyped_storage().data_ptr())
        return out
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    if function is aten.is_pinned.default:
        return args[0].untyped_storage().data_ptr() in _pinned
    if not ours and (asked is None or asked.type != GPU.type):
        return function(*args, **kwargs)
    if function is aten._to_copy.default:
        return to_copy(args[0], asked or args[0].device, kwargs)
    if function is aten.copy_.default and len(ours) < len(tensors):
        copy(args[0], args[1], (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False))
        return args[0]
    foreign = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()]
    if foreign and ours and function not in TAKE_THE_CPU:
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, but found {GPU} and cpu")
    to_the_cpu = asked is not None and asked.type == "cpu"
    kwargs = {**kwargs, **({"device": CPU} if asked is not None else {})}
    stream = current_stream()
    for tensor in ours:
        stream.reads(tensor)
    found = function(*tree_map_only(DeviceTensor, real, args), **tree_map_only(DeviceTensor, real, kwargs))
    stream.launches()
    if to_the_cpu:
        return found
    # What an operation changed in place is returned as the same object; a new view shares memory.
    same = {}
    for tensor in ours:
        same.setdefault(key(tensor), tensor)
    changed = function._schema.is_mutable
    for tensor in ours if changed else ():
        stream.writes(tensor)

    def wrapped(out):
        if changed and key(out) in same and not isinstance(out, DeviceTensor):
            return same[key(out)]
        made = DeviceTensor(out)
        stream.writes(made)
        return made

    return tree_map_only(torch.Tensor, wrapped, found)


def key(tensor) -> tuple:
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return address(tensor), tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype


def address(tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def to_copy(source, device, kwargs):
    """``tensor.to(...)``. A non-blocking copy to the CPU is to pinned memory, as torch makes it."""
    kwargs = dict(kwargs)
    kwargs.pop("device", None)
    later = kwargs.pop("non_blocking", False)
    like = real(source) if isinstance(source, DeviceTensor) else source
    made = aten._to_copy.default(like, **kwargs)
    if device.type == GPU.type:
        made = DeviceTensor(made)
    if isinstance(source, DeviceTensor) == isinstance(made, DeviceTensor):
        return made
    if later and device.type == "cpu":
        _pinned.add(made.untyped_storage().data_ptr())
    copy(made, source, later)
    return made


def copy(into, source, later: bool) -> None:
    """Between the device and the CPU: at once, or when somebody waits for the stream, if host memory is pinned."""
    stream, on_host = current_stream(), source if isinstance(into, DeviceTensor) else into
    target, origin = (real(one) if isinstance(one, DeviceTensor) else one for one in (into, source))
    stream.reads(source) if isinstance(source, DeviceTensor) else None
    if isinstance(source, DeviceTensor) and not stream.knows(source):
        origin = garbage(torch.empty_like(origin))
    if later and on_host.untyped_storage().data_ptr() in _pinned:
        origin = origin if isinstance(source, DeviceTensor) else origin.clone()
        garbage(target)
        stream.pending.append(lambda: target.copy_(origin))
    else:
        stream.synchronize()
        target.copy_(origin)
    if isinstance(into, DeviceTensor):
        stream.writes(into)


def garbage(tensor):
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 77 if tensor.dtype != torch.bool else True)


class Stream:
    """Work in order: ``pending`` copies, how much was launched, and what other streams it has waited for."""

    def __init__(self, device=None, **_):
        self.pending, self.count, self.ended, self.waited = [], 0, 0, {}

    def launches(self) -> None:
        self.count += 1

    def reads(self, tensor) -> None:
        """A kernel of this stream comes after this stream's own copies."""
        self.run_pending()

    def writes(self, tensor) -> None:
        self.count += 1
        _written[address(tensor)] = self, self.count

    def knows(self, tensor) -> bool:
        by, count = _written.get(address(tensor), (self, 0))
        return by is self or max(self.waited.get(by, 0), by.ended) >= count

    def wait_stream(self, other) -> None:
        self.waited[other] = other.count
        self.waited.update({one: max(count, self.waited.get(one, 0)) for one, count in other.waited.items()})
        other.run_pending()

    def wait_event(self, event) -> None:
        self.waited[event.stream] = max(event.count, self.waited.get(event.stream, 0))

    def run_pending(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def synchronize(self) -> None:
        """The host waits, so what any stream is given from here on comes after this one's work."""
        self.run_pending()
        self.ended = self.count

    def query(self) -> bool:
        return not self.pending

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *_, **__):
        self.stream, self.count = DEFAULT, 0

    def record(self, stream=None) -> None:
        self.stream = stream or current_stream()
        self.count = self.stream.count

    def synchronize(self) -> None:
        self.stream.synchronize()

    def query(self) -> bool:
        return self.stream.query()

    def wait(self, stream=None) -> None:
        (stream or current_stream()).wait_event(self)


DEFAULT = Stream()
_written: dict = {}
_pinned: set = set()
pinned: list = []  # requests for pinned memory
_here = threading.local()


def current_stream(device=None) -> Stream:
    return getattr(_here, "stream", DEFAULT)


@contextlib.contextmanager
def stream(chosen):
    before, _here.stream = current_stream(), chosen
    try:
        yield
    finally:
        _here.stream = before


def synchronize(device=None) -> None:
    current_stream().synchronize()
    DEFAULT.synchronize()


class Mode(contextlib.ContextDecorator):
    """Enter the mode in this thread."""

    def __enter__(self):
        self._modes = contextlib.ExitStack()
        self._modes.enter_context(FakeGPU())
        self._modes.enter_context(FromNumbers())

    def __exit__(self, *problem):
        return self._modes.__exit__(*problem)


PROPERTIES = kinds.SimpleNamespace(
    uuid="GPU-fake", name="Fake", total_memory=2**30, pci_domain_id=0, pci_bus_id=0, pci_device_id=0, major=9, minor=0
)
STANDS_FOR = {
    "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "init": lambda: None,
    "current_device": lambda: 0, "set_device": lambda device: None, "synchronize": synchronize, "Stream": Stream,
    "Event": Event, "stream": stream, "current_stream": current_stream, "_lazy_init": lambda: None,
    "get_device_properties": lambda device=None: PROPERTIES, "memory_allocated": lambda device=None: 0,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(), "manual_seed_all": lambda seed: None,
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
}  # fmt: skip


def from_dlpack(tensor, imported=torch.from_dlpack):
    """Another tensor on the same memory."""
    return DeviceTensor(real(tensor)) if isinstance(tensor, DeviceTensor) else imported(tensor)


@contextlib.contextmanager
def fake_gpu():
    """A fake device in this process, its threads included."""
    run_thread = threading.Thread.run

    def run_in_mode(thread):
        with Mode():
            run_thread(thread)

    with contextlib.ExitStack() as stack:
        for name, function in STANDS_FOR.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch.distributed, "is_nccl_available", lambda: False))
        stack.enter_context(patch.object(torch, "from_dlpack", from_dlpack))
        stack.enter_context(patch.object(threading.Thread, "run", run_in_mode))
        stack.enter_context(patch.object(FreedGradient, "like", classmethod(placeholder)))
        stack.enter_context(Mode())
        try:
            yield GPU
        finally:
            DEFAULT.synchronize()
            _written.clear()
            _pinned.clear()
