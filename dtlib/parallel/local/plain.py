"""Local training: each rank takes several optimizer steps alone between two messages. Read from top to bottom.

Eight steps of two ranks. A dot is a step. A bar is a message with all parameters or gradients, for which both wait:

    data parallelism     rank 0  .|.|.|.|.|.|.|.|     the mean of gradients, every step
                         rank 1  .|.|.|.|.|.|.|.|
    sync_every = 4       rank 0  . . . .|. . . .|     every fourth step
                         rank 1  . . . .|. . . .|

    LocalSGD     the mean of the parameters replaces the parameters
    DiLoCo       the outer gradient is the parameters at the start of the round minus that mean. A second (outer)
                 optimizer uses it, and its Nesterov momentum remembers earlier rounds

Local SGD: S. Stich, ICLR 2019. DiLoCo: A. Douillard et al., arXiv:2311.08105. Names as in torchft.
"""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer


class LocalSGD:
    """``step()`` replaces ``optimizer.step()``: every ``sync_every`` steps, ranks take the mean of their parameters.

    Contract: all ranks take the same number of steps; no buffers; one dtype. Rank 0's parameters are broadcast at
    construction. The states of ``optimizer``, such as momenta, stay local.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, optimizer: Optimizer, sync_every: int):
        self.group, self.optimizer, self.sync_every, self.steps = group, optimizer, sync_every, 0
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), group_src=0, group=group)

    def step(self) -> None:
        """Take a local step, and synchronise at the end of a round."""
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.sync_every == 0:
            with torch.no_grad():
                self.synchronise()

    def synchronise(self) -> None:
        """Replace the parameters by their mean over ranks."""
        for parameter, mean in zip(self.trained, self.means(self.trained), strict=True):
            parameter.copy_(mean)

    def means(self, tensors: list) -> list[Tensor]:
        """Return the means of the tensors over ranks, with one message."""
        dist.all_reduce(flat := torch.cat([tensor.flatten() for tensor in tensors]), group=self.group)
        flat /= dist.get_world_size(self.group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


class DiLoCo(LocalSGD):
    """The same, but at the end of a round ``outer_optimizer`` takes one step from the parameters at the round's start.

    ``outer_optimizer`` is a torch optimizer over the model's parameters, in the paper ``SGD(lr=0.7, momentum=0.9,
    nesterov=True)``. With ``SGD(lr=1)`` this is local SGD.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, inner_optimizer: Optimizer,
                 outer_optimizer: Optimizer, sync_every: int):  # fmt: skip
        super().__init__(group, model, inner_optimizer, sync_every)
        self.outer_optimizer = outer_optimizer
        self.starts = [parameter.detach().clone() for parameter in self.trained]

    def synchronise(self) -> None:
        """Average how far the ranks have moved, and give that to the outer optimizer as a gradient."""
        moved = [start - now for start, now in zip(self.starts, self.trained, strict=True)]
        means = self.means(moved)  # the outer gradient, equal on all ranks
        for parameter, start, mean in zip(self.trained, self.starts, means, strict=True):
            # Reset to the round's start, which is the same on all ranks.
            parameter.copy_(start)
            parameter.grad = mean
        self.outer_optimizer.step()
        for parameter, start in zip(self.trained, self.starts, strict=True):
            start.copy_(parameter)
            parameter.grad = None


# LocalSGD and DiLoCo in full.py add: checkpoints, buffers, several dtypes, and a last message after a partial round.
# Where dtlib is installed, checks.py checks the contract above. This file imports only torch.
