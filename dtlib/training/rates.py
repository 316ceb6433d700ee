"""Learning rate schedules with warm-up and decay, and rules that scale the rate with the batch size."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dtlib.errors import number
from dtlib.training.config import ConfigError

WARMUP_TYPES = ("log", "linear")
WARMUP_STEPS = 1000


def linear_rule(rate: float, batch: int, base_batch: int) -> float:
    """Return the rate for ``batch``: k times the batch, k times the rate.

    P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1.
    """
    return rate * batch / base_batch


def square_root_rule(rate: float, batch: int, base_batch: int) -> float:
    """Return the rate for ``batch``: k times the batch, sqrt(k) times the rate.

    This keeps the variance of a step (A. Krizhevsky, 2014, section 5).
    """
    return rate * math.sqrt(batch / base_batch)


class WarmupLR(LRScheduler):
    """A rate that rises from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then stays constant.

    Call ``step()`` after the optimizer's. Counterpart, with equal rates in each step:
    ``deepspeed.runtime.lr_schedules.WarmupLR``.

    Args:
        warmup_max_lr: by default the optimizer's own rates (DeepSpeed: 0.001).
        warmup_type: ``log`` (steep first) or ``linear``.

    Raises:
        ConfigError: for another ``warmup_type``, or an invalid number of steps.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_min_lr: float = 0.0, warmup_max_lr: float | None = None,
        warmup_num_steps: int = WARMUP_STEPS, warmup_type: str = "log", last_epoch: int = -1,
    ):  # fmt: skip
        if warmup_type not in WARMUP_TYPES:
            raise ConfigError(f"warmup_type is {warmup_type!r}: choose one of {', '.join(WARMUP_TYPES)}.")
        number("warmup_num_steps", warmup_num_steps, 0, error=ConfigError)
        self.lowest = warmup_min_lr
        self.highest = warmup_max_lr
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        # As in DeepSpeed, the first two steps run at the lowest rate.
        done = self.last_epoch - 1
        fraction = self._after(done) if done >= self.warmup_num_steps else self._warmup(max(0, done))
        highest = self.base_lrs if self.highest is None else [self.highest] * len(self.base_lrs)
        return [self.lowest + (high - self.lowest) * fraction for high in highest]

    def _warmup(self, done: int) -> float:
        if self.warmup_type == "linear":
            return done / self.warmup_num_steps
        return math.log(done + 1) / math.log(self.warmup_num_steps)

    def _after(self, done: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A ``WarmupLR`` that then falls linearly to ``warmup_min_lr`` at step ``total_num_steps``.

    Counterpart: ``deepspeed.runtime.lr_schedules.WarmupDecayLR``.
    """

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int, warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None, warmup_num_steps: int = WARMUP_STEPS, warmup_type: str = "log",
        last_epoch: int = -1,
    ):  # fmt: skip
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_epoch)

    def _after(self, done: int) -> float:
        left = self.total_num_steps - done
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(WarmupLR):
    """A rate that rises to the optimizer's own rates, then falls along half a cosine.

    It starts at ``warmup_min_ratio`` times these rates, and ends at ``cos_min_ratio`` times them at step
    ``total_num_steps``. Counterpart: ``deepspeed.runtime.lr_schedules.WarmupCosineLR``.
    """

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = WARMUP_STEPS, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
        last_epoch: int = -1,
    ):  # fmt: skip
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        self.cos_min_ratio, self.warmup_min_ratio = cos_min_ratio, warmup_min_ratio
        super().__init__(optimizer, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type, last_epoch=last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        done = self.last_epoch - 1
        if done < 0:
            ratio = 0.0
        elif done < self.warmup_num_steps:
            ratio = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmup(done)
        else:
            steps = max(1, self.total_num_steps - self.warmup_num_steps)
            progress = min(1.0, (done - self.warmup_num_steps + 1) / steps)
            ratio = self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        return [base * ratio for base in self.base_lrs]


def _total(steps: int, warmup: int) -> int:
    return int(number("total_num_steps", steps, warmup, error=ConfigError, why=", at least warmup_num_steps"))


SCHEDULERS = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
