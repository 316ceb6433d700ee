"""What comes and goes while a block runs: tensors that autograd keeps, and memory that torch's allocator gives out."""

from collections.abc import Iterable

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

from dtlib.measure.storages import storage_key


class Activations:
    """A context in which the storages that autograd keeps are counted, each once: ``now``, and ``most`` at a time.

    ``others`` are keys of storages that are none, such as parameters. Autograd does not notice meanwhile that a tensor
    that it keeps is changed in place.
    """

    def __init__(self):
        self.others = set()
        self.now = self.most = 0  # bytes
        self._kept = {}  # by storage: how often autograd keeps it
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> "Activations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._hooks.__exit__(*problem)

    def _pack(self, tensor):
        key = storage_key(tensor)
        if key in self.others:
            return tensor
        if key not in self._kept:
            self._kept[key] = 0
            self.now += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.now)
        self._kept[key] += 1
        return _Kept(tensor, self)

    def let_go(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        self._kept[key] -= 1
        if not self._kept[key]:
            del self._kept[key]
            self.now -= tensor.untyped_storage().nbytes()


class _Kept:
    """A tensor that autograd keeps; once it does not, this object goes, and says so."""

    def __init__(self, tensor, activations: Activations):
        self.tensor, self._activations = tensor, activations

    def __del__(self):
        self._activations.let_go(self.tensor)


def _unpack(kept):
    return kept.tensor if isinstance(kept, _Kept) else kept


class Allocations:
    """A context in which this thread's allocations are recorded; ``most`` is the most bytes at a time, above those that
    were there before. With ``devices``, which are GPUs, it is the most on these, with what was there before."""

    def __init__(self, devices: Iterable[torch.device] = ()):
        self.devices = devices
        self.most = 0

    def __enter__(self) -> "Allocations":
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self.devices:
            # Of torch's two profilers the one that writes nothing to stderr when it starts, in whatever thread.
            only_memory = False, True, False, False, False
            experimental = torch._C._profiler._ExperimentalConfig()
            _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *only_memory, experimental))
        return self

    def __exit__(self, *problem: object) -> None:
        if self.devices:
            self.most = sum(torch.cuda.max_memory_allocated(device) for device in self.devices)
            return
        running = 0
        for event in (event for thread in _disable_profiler_legacy() for event in thread):
            if event.kind() == "memory_alloc":
                running += event.cpu_memory_usage()  # negative where memory is freed
                self.most = max(self.most, running)
