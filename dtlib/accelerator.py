"""DeepSpeed's name for the device of this rank: ``from dtlib.accelerator import get_accelerator``."""

import torch

from dtlib.world import init


class Accelerator:
    """A GPU of this machine, or the CPU. Counterpart: ``deepspeed.accelerator``; what it has beside this is reached as
    ``torch.cuda``."""

    def is_available(self) -> bool:
        """Whether there is a GPU."""
        return torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:1`` for an index, or ``cpu``."""
        if not self.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        return torch.cuda.device_count() or 1

    def current_device(self) -> int:
        return torch.cuda.current_device() if self.is_available() else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a GPU the one that ``cuda`` means; on the CPU nothing. Ranks may share one: the index counts on."""
        if self.is_available():
            torch.cuda.set_device(int(device_index) % torch.cuda.device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        if self.is_available():
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """What ``torch.distributed`` runs on after ``init_distributed()``."""
        return "dtlib"

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that torch has given out on the GPU; 0 on the CPU, where ``dtlib.memory`` counts."""
        return torch.cuda.memory_allocated(device_index) if self.is_available() else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self.is_available() else 0

    def empty_cache(self) -> None:
        if self.is_available():
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def get_accelerator() -> Accelerator:
    """The device of this rank. Counterpart: ``deepspeed.accelerator.get_accelerator``."""
    init()
    return Accelerator()
