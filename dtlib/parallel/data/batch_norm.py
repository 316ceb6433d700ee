"""Batch normalisation with statistics over the batches of all ranks.

With few samples per rank, the statistics of one rank's slice are noisy. Here every rank normalises with the mean and
variance of the whole batch. Ranks exchange three numbers per channel in the forward pass and two in the backward pass:

    rank r   count, mean, sum of squared deviations  --- all_gather --->  the same of the whole batch
    rank r   sum of dy, sum of dy * x_hat            --- all_reduce --->  the same of the whole batch
"""

from copy import deepcopy

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.world import init


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``BatchNorm`` for inputs ``(N, C, ...)`` that computes its training statistics over the slices of all ranks.

    ``N`` may differ between ranks. All ranks call it in the same order. ``comm`` defaults to the communicator of
    ``dtlib.init()``. Counterpart: ``torch.nn.SyncBatchNorm``, which supports only GPUs.
    """

    communicates_in_forward = True

    def __init__(self, num_features: int, comm: AnyCommunicator | None = None, eps: float = 1e-5,
                 momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True):  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # A separate communicator, because other collectives may start in an order that differs between ranks.
        self.comm = as_communicator(init().comm if comm is None else comm).split(0)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, comm: AnyCommunicator | None = None) -> nn.Module:
        """Replace every ``BatchNorm`` of a model and return the model. Parameters, statistics and hooks are kept."""
        comm = as_communicator(init().comm if comm is None else comm)
        everything = list(module.modules())
        made: dict[nn.Module, nn.Module] = {
            one: cls._converted(one, comm)
            for one in everything
            if isinstance(one, nn.modules.batchnorm._BatchNorm) and not isinstance(one, cls)
        }
        for owner in everything:  # a module may have several owners and names
            owner._modules.update({name: made[one] for name, one in owner._modules.items() if one in made})
        return made.get(module, module)

    @classmethod
    def _converted(cls, norm, comm) -> nn.Module:
        made = cls(norm.num_features, comm, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.weight, made.bias, made._buffers = norm.weight, norm.bias, norm._buffers
        # Keep the hooks of users.
        vars(made).update({name: hooks for name, hooks in vars(norm).items() if name.endswith("_hooks")})
        return made.train(norm.training)

    def __deepcopy__(self, memo: dict) -> "SyncBatchNorm":
        memo[id(self.comm)] = self.comm  # a copy uses the same communicator
        memo[id(self)] = made = self.__class__.__new__(self.__class__)
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def _check_input_dim(self, x):
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise DtlibError(
                f"SyncBatchNorm({self.num_features}) needs inputs of shape (N, {self.num_features}, ...), and got "
                f"{tuple(x.shape)}."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        if not (self.training or self.running_mean is None):
            return super().forward(x)
        normalised, mean, variance, count = _Normalise.apply(x, self.comm, self.eps)
        if self.training and self.track_running_stats:
            self._keep(mean, variance * count / max(count - 1, 1))
        if not self.affine:
            return normalised
        return (normalised * _by_channel(self.weight, x) + _by_channel(self.bias, x)).to(x.dtype)

    def _keep(self, mean, variance) -> None:
        """Update the running statistics. ``momentum=None`` keeps the plain average over all batches."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), with statistics over all ranks. S. Ioffe and C. Szegedy, ICML 2015."""

    @staticmethod
    def forward(ctx, x, comm, eps):
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.double() if x.dtype == torch.float64 else x.float()
        count = x.numel() // x.shape[1]
        mean = wide.mean(axes) if count else wide.new_zeros(x.shape[1])
        deviations = (wide - _by_channel(mean, x)).square().sum(axes)
        mine = torch.cat([mean, deviations, mean.new_tensor([count])])
        everyones = comm.all_gather(mine.new_empty(comm.size, len(mine)), mine)
        means, squares, counts = everyones.split([len(mean), len(mean), 1], dim=1)
        total = counts.sum()
        if total <= 1:
            raise DtlibError(
                f"SyncBatchNorm got {total:g} values per channel on all ranks together, but a variance needs at least "
                "two: train with larger batches, or call eval()."
            )
        # Combine the squared deviations from each rank's mean into deviations from the common mean: T. Chan et al.,
        # COMPSTAT 1982.
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        scale = (variance + eps).rsqrt()
        normalised = (wide - _by_channel(mean, x)) * _by_channel(scale, x)
        ctx.save_for_backward(normalised, scale)
        ctx.comm, ctx.axes, ctx.total = comm, axes, total
        ctx.mark_non_differentiable(mean, variance)
        return normalised.to(x.dtype), mean, variance, float(total)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        normalised, scale = ctx.saved_tensors
        dy = dy.to(normalised.dtype)
        sums = torch.stack([dy.sum(ctx.axes), (dy * normalised).sum(ctx.axes)])
        # Through the statistics, the loss of every rank depends on the input of every rank.
        mean_dy, mean_dy_x = ctx.comm.all_reduce(sums) / ctx.total
        dx = dy - _by_channel(mean_dy, dy) - normalised * _by_channel(mean_dy_x, dy)
        return (dx * _by_channel(scale, dy)).to(dy.dtype), None, None


def _by_channel(values, like):
    return values.view(1, -1, *[1] * (like.dim() - 2))
