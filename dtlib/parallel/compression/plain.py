"""Gradient compression, to be read from top to bottom.

Bytes and messages that each of N ranks sends for a bucket of n elements of b bytes:

    all_reduce       2 (N-1)/N n b                       2 (N-1)    the bucket as it is, by the ring
    top_k_hook       (N-1) k (4 + b)                     N-1        each rank's k largest elements and their indices
    eight_bit_hook   2 (N-1) blocks (4 + block)          2 (N-1)    8 bits per element, and a scale per block
    powerSGD_hook    2 (N-1)/N rank (rows + columns) b   4 (N-1)    two thin matrices instead of one, by the ring

Top-k and PowerSGD keep what they do not send and add it to the next gradient (error feedback), so no gradient is lost.
Use: ``model.register_comm_hook(TopKState(comm), top_k_hook)``.
"""

import math

import torch
from torch import distributed as dist
from torch.distributed import GradBucket, ProcessGroup
from torch.nn.functional import pad


class TopKState:
    """Send ``fraction`` of a bucket's elements. ``residual`` maps each parameter to the elements that were not sent."""

    def __init__(self, group: ProcessGroup | None = None, fraction: float = 0.01, feedback: bool = True):
        self.group, self.fraction, self.feedback, self.residual = group or dist.group.WORLD, fraction, feedback, {}


def top_k_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the ``k = ceil(fraction n)`` elements of largest absolute value that each rank sends."""
    both = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for parameter, gradient in both:
        gradient += state.residual.get(parameter, 0)
    flat, ranks = bucket.buffer(), state.group.size()
    k = math.ceil(state.fraction * len(flat))
    places = flat.abs().topk(k).indices
    mine = torch.cat([places.int().view(torch.uint8), flat[places].view(torch.uint8)])
    dist.all_gather_single(everyones := mine.new_empty(ranks * len(mine)), mine, group=state.group)
    if state.feedback:
        flat[places] = 0
        state.residual |= {parameter: rest.clone() for parameter, rest in both}
    mean = torch.zeros_like(flat)  # add rank by rank: a GPU adds one array in any order, so ranks would differ
    for at, values in zip(*everyones.view(ranks, -1).split([4 * k, len(mine) - 4 * k], 1), strict=True):
        mean.index_add_(0, at.clone().view(torch.int32), values.clone().view(flat.dtype) / ranks)
    return done(mean)


class EightBitState:
    """``block`` consecutive elements share a scale, which maps the largest one to 127."""

    def __init__(self, group: ProcessGroup | None = None, block: int = 256):
        self.group, self.block = group or dist.group.WORLD, block


def eight_bit_hook(state: EightBitState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average in 8 bits: rank r receives part r of all ranks, averages in float32, and sends the result in 8 bits."""
    flat, ranks = bucket.buffer(), state.group.size()
    blocks = math.ceil(len(flat) / (ranks * state.block))  # blocks per rank
    mine = rounded(pad(flat, (0, ranks * blocks * state.block - len(flat))).view(ranks, blocks, state.block))
    dist.all_to_all_single(everyones := torch.empty_like(mine), mine, group=state.group)
    mean = rounded(unrounded(everyones).mean(0))
    dist.all_gather_single((means := torch.empty_like(mine)).flatten(0, 1), mean, group=state.group)
    return done(unrounded(means).flatten()[: len(flat)].to(flat.dtype))


def rounded(blocks: torch.Tensor) -> torch.Tensor:
    """Return each block (last dimension) as the 4 bytes of its scale, followed by integers from -127 to 127."""
    blocks = blocks.float()  # in float16, a small scale would be subnormal
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-38)
    return torch.cat([scales.view(torch.int8), (blocks / scales).round().to(torch.int8)], -1)


def unrounded(octets: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks made by ``rounded``, in float32."""
    return octets[..., :4].contiguous().view(torch.float32) * octets[..., 4:]


class PowerSGDState:
    """``q`` maps each parameter to its last Q, from which the next step starts. Arguments as in torch's class."""

    def __init__(self, group: ProcessGroup | None = None, matrix_approximation_rank: int = 1,
                 min_compression_rate: float = 2, feedback: bool = True):  # fmt: skip
        self.group, self.rank, self.rate = group, matrix_approximation_rank, min_compression_rate
        self.feedback, self.residual, self.q = feedback, {}, {}

    def is_large(self, gradient: torch.Tensor) -> bool:
        """Return False for vectors and for matrices that would not become ``min_compression_rate`` times smaller."""
        return gradient.dim() > 1 and self.rank * (len(gradient) + gradient[0].numel()) * self.rate < gradient.numel()

    def first_q(self, matrix: torch.Tensor) -> torch.Tensor:
        chance = torch.Generator().manual_seed(0)  # all ranks draw the same Q
        return torch.randn(matrix.shape[1], min(self.rank, *matrix.shape), generator=chance).to(matrix)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Approximate the mean of the matrices M by P Q^T: P is the orthogonalised mean of M Q, and Q the mean of M^T P."""
    both = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for parameter, gradient in both:
        gradient += state.residual.get(parameter, 0)
    large = [(parameter, gradient, gradient.flatten(1)) for parameter, gradient in both if state.is_large(gradient)]
    whole = [gradient for gradient in bucket.gradients() if not state.is_large(gradient)]
    means = averaged(state.group, [m @ state.q.get(parameter, state.first_q(m)) for parameter, _, m in large] + whole)
    ps = [torch.linalg.qr(mean.double()).Q.to(mean) for mean in means[: len(large)]]
    qs = [m.mT @ p for (_, _, m), p in zip(large, ps, strict=True)]
    for gradient, mean in zip(whole, means[len(large) :], strict=True):
        gradient.copy_(mean)
    mean_qs = averaged(state.group, qs) if qs else []
    for (parameter, gradient, m), p, q, mean_q in zip(large, ps, qs, mean_qs, strict=True):
        state.residual |= {parameter: (m - p @ q.mT).view_as(gradient)} if state.feedback else {}
        gradient.copy_((p @ mean_q.mT).view_as(gradient))
        state.q[parameter] = mean_q
    return done(bucket.buffer())


def averaged(group: ProcessGroup | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means over ranks, with one message."""
    dist.all_reduce(flat := torch.cat([tensor.flatten() for tensor in tensors]), group=group)
    flat /= dist.get_world_size(group)
    return [mean.view_as(one) for mean, one in zip(flat.split([one.numel() for one in tensors]), tensors, strict=True)]


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future, because torch expects a future from a hook."""
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


# torch's powerSGD_hook also overlaps messages with computing. Do not scale losses: the kept part would not match. Where
# dtlib is installed, checks.py refuses settings that make no sense. This file imports only torch.
