"""The race of lesson 13: which compressed method reaches a loss with the fewest bytes?

Four ranks are SIMULATED in one process, so that hundreds of runs take seconds. The networks of all seeds and rates are
one stack (dtlib/workloads/digits.py); local SGD and DiLoCo have one network per rank in it. Bytes are computed by the
formulas of ``dtlib.theory``, with indices, scales and padding, and a ring for all_reduce. A test compares the results
with the hooks and classes of ``dtlib.parallel`` on real ranks.

    tuned      OTHER_SEEDS, each of RATES   the rate with which most seeds reach the loss, then with the lowest loss
    raced      SEEDS, that rate             the same seeds for all methods, so runs are paired
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtlib.parallel.compression.plain import PowerSGDState, rounded, unrounded
from dtlib.theory.collectives import elements_sent_by_the_busiest
from dtlib.theory.compression import eight_bit_bytes, powersgd_elements, top_k_bytes
from dtlib.workloads import digits

RANKS, BATCH = 4, 16  # BATCH is images per rank and step
STEPS, CHECK_EVERY = 240, 8
TARGET, LOOKED_AT = 0.1, 320  # target loss, and number of training images for it
RATES = (0.02, 0.04, 0.08, 0.16, 0.32)
SEEDS, OTHER_SEEDS = tuple(range(8)), tuple(range(100, 104))
SHAPES = [shape for i, o in zip(digits.WIDTHS, digits.WIDTHS[1:], strict=False) for shape in ((i, o), (1, o))]
SIZES = [math.prod(shape) for shape in SHAPES]
COUNT = sum(SIZES)


def ring(elements: int) -> int:
    """Return the bytes that a rank sends in a ring all_reduce of ``elements`` numbers of 4 bytes."""
    return 4 * elements_sent_by_the_busiest("all_reduce", "ring", RANKS, elements)


class Whole:
    """No compression: gradients (networks, ranks, elements) are averaged over ranks.

    ``bytes`` are sent every ``every`` steps.
    """

    every, bytes = 1, ring(COUNT)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return gradients.mean(1)


class TopK(Whole):
    """Top-k compression with error feedback."""

    def __init__(self, fraction: float, feedback: bool = True):
        self.count, self.feedback, self.kept = math.ceil(fraction * COUNT), feedback, 0
        self.bytes = top_k_bytes(COUNT, RANKS, fraction)

    def __call__(self, gradients):
        """Return the mean of the largest elements of each rank."""
        wanted = gradients + self.kept
        places = wanted.abs().topk(self.count, sorted=False).indices
        sent = torch.zeros_like(wanted).scatter_(2, places, wanted.gather(2, places))
        if self.feedback:
            self.kept = wanted - sent
        return sent.mean(1)


class EightBit(Whole):
    """Compression of gradients to 8 bits."""

    def __init__(self, block: int = 256):
        self.block, self.bytes = block, eight_bit_bytes(COUNT, RANKS, block)

    def __call__(self, gradients):
        """Return the mean of rounded gradients, rounded again."""
        blocks = RANKS * math.ceil(COUNT / (RANKS * self.block))
        padded = pad(gradients, (0, blocks * self.block - COUNT)).unflatten(2, (blocks, self.block))
        mean = unrounded(rounded(padded)).mean(1)
        return unrounded(rounded(mean)).flatten(1)[:, :COUNT]


class PowerSGD(Whole):
    """Low-rank compression of gradients."""

    def __init__(self, rank: int, feedback: bool = True):
        self.rank, self.feedback, self.kept, self.q = rank, feedback, 0, {}
        self.bytes = sum(map(ring, powersgd_elements(SHAPES, rank)))

    def __call__(self, gradients):
        """Return the mean of low-rank approximations; small parameters are averaged exactly."""
        wanted, means, rests = gradients + self.kept, [], []
        for number, (piece, shape) in enumerate(zip(wanted.split(SIZES, dim=2), SHAPES, strict=True)):
            if not powersgd_elements([shape], self.rank)[1]:
                means.append(piece.mean(1))
                rests.append(torch.zeros_like(piece))
                continue
            m = piece.unflatten(2, shape)
            # One power iteration: m is approximated by p q^T, with p orthonormal.
            q = self.q.get(number, PowerSGDState.first_q(self, m[0, 0]).expand(len(m), -1, -1))
            p = torch.linalg.qr((m @ q[:, None]).mean(1))[0]
            own = m.mT @ p[:, None]
            self.q[number] = own.mean(1)
            means.append((p @ self.q[number].mT).flatten(1))
            rests.append((m - p[:, None] @ own.mT).flatten(2))
        if self.feedback:
            self.kept = torch.cat(rests, 2)
        return torch.cat(means, 1)


class Local:
    """Local steps, with an outer step by SGD with Nesterov momentum every ``every`` steps; by default, averaging."""

    bytes = ring(COUNT)

    def __init__(self, every: int, outer_rate: float = 1.0, outer_momentum: float = 0.0):
        self.every, self.rate, self.momentum, self.velocity = every, outer_rate, outer_momentum, 0

    def outer(self, start: Tensor, parameters: Tensor) -> Tensor:
        """Return the parameters after an outer step."""
        gradient = start - parameters.mean(1)
        self.velocity = self.momentum * self.velocity + gradient
        return start - self.rate * (gradient + self.momentum * self.velocity)


METHODS = {
    "DDP": Whole,
    "8 bits": EightBit,
    "top 1 %": lambda: TopK(0.01),
    "top 1 %, no feedback": lambda: TopK(0.01, feedback=False),
    "PowerSGD": lambda: PowerSGD(1),
    "PowerSGD, no feedback": lambda: PowerSGD(1, feedback=False),
    "local SGD, H = 8": lambda: Local(8),
    "DiLoCo, H = 8": lambda: Local(8, 0.7, 0.9),
}
ONCE = "averaged once"


@dataclass
class Result:
    """The result of a method.

    ``losses`` has one row per evaluation and one column per seed; ``kilobytes`` are sent by a rank before each
    evaluation. ``tried`` has for each rate the number of other seeds that reached TARGET, and their mean kB.
    """

    rate: float
    tried: list[tuple[int, float]]
    kilobytes: list[float]
    losses: list[list[float]]

    def until(self, target: float = TARGET) -> list[float]:
        """Return for each seed the kB until its loss reached ``target``, infinity if never."""
        columns = zip(*self.losses, strict=True)
        return [
            next((kb for kb, loss in zip(self.kilobytes, c, strict=True) if loss <= target), math.inf) for c in columns
        ]


def run(method, seeds, rates: Tensor, steps: int = STEPS) -> tuple[list[float], Tensor]:
    """Train one network per seed, each with its own rate, by SGD with Nesterov momentum on RANKS ranks.

    Returns kB, and losses (evaluations, networks) of the mean over ranks.
    """
    images, tasks = digits.load()[0], [digits.task(seed, epochs=12) for seed in seeds]
    train, labels, order = (torch.stack([getattr(t, name) for t in tasks]) for name in ("train", "labels", "order"))
    looked_at = images[train[:, :LOOKED_AT]], labels[:, :LOOKED_AT]
    start = torch.stack([torch.cat([tensor.flatten() for tensor in task.start]) for task in tasks])
    local = isinstance(method, Local)
    flat = start[:, None].repeat(1, RANKS if local else 1, 1)
    momentum, kilobytes, losses = torch.zeros_like(flat), [], []
    for step in range(steps):
        seen = order[:, step * BATCH * RANKS : (step + 1) * BATCH * RANKS]
        x, y = images[train.gather(1, seen)].view(-1, BATCH, 64), labels.gather(1, seen).view(-1, BATCH)
        # One row for each network and rank, so that one backward pass gives the gradients of all ranks.
        each = flat.expand(-1, RANKS, -1).reshape(-1, COUNT).requires_grad_()
        [gradients] = torch.autograd.grad(digits.losses(_layers(each), x, y).sum(), each)
        with torch.no_grad():
            gradients = gradients.view(len(tasks), RANKS, COUNT)
            if not local:
                gradients = method(gradients)[:, None]
            momentum.mul_(digits.MOMENTUM).add_(gradients)
            flat = flat - rates[:, None, None] * (gradients + digits.MOMENTUM * momentum)
            if local and (step + 1) % method.every == 0:
                start = method.outer(start, flat)
                flat = start[:, None].repeat(1, RANKS, 1)
            if (step + 1) % CHECK_EVERY == 0:
                kilobytes.append((step + 1) // method.every * method.bytes / 1000)
                losses.append(digits.losses(_layers(flat.mean(1)), *looked_at))
    return kilobytes, torch.stack(losses)


def _layers(flat: Tensor) -> list[Tensor]:
    return [piece.unflatten(1, shape) for piece, shape in zip(flat.split(SIZES, dim=1), SHAPES, strict=True)]


def raced(name: str) -> Result:
    """Tune the rate on OTHER_SEEDS, then run on SEEDS. The last loss breaks ties between rates."""
    rates = torch.tensor(RATES).repeat_interleave(len(OTHER_SEEDS))
    kilobytes, losses = run(METHODS[name](), OTHER_SEEDS * len(RATES), rates)
    tried, ends = [], []
    for its_losses in losses.split(len(OTHER_SEEDS), dim=1):
        reached = [kb for kb in Result(0, [], kilobytes, its_losses.tolist()).until() if kb < math.inf]
        tried.append((len(reached), sum(reached) / len(reached) if reached else math.inf))
        ends.append(its_losses[-1].mean().item())
    rate = RATES[min(range(len(RATES)), key=lambda i: (-tried[i][0], ends[i]))]
    return Result(rate, tried, *_reported(METHODS[name](), rate))


def untuned(name: str, rate: float) -> Result:
    """Run on SEEDS with this rate; ONCE averages the ranks at the very end only."""
    return Result(rate, [], *_reported(Local(STEPS) if name == ONCE else METHODS[name](), rate))


def _reported(method, rate: float):
    kilobytes, losses = run(method, SEEDS, torch.full((len(SEEDS),), rate))
    return kilobytes, losses.tolist()
