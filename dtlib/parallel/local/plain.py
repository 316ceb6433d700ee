"""Steps that each rank takes alone, and seldom a message; to be read from top to bottom.

Eight steps of two ranks. A dot is a step, a bar a message of all parameters or gradients, for which both wait:

    data parallelism     rank 0  .|.|.|.|.|.|.|.|     the mean of gradients, every step
                         rank 1  .|.|.|.|.|.|.|.|
    sync_every = 4       rank 0  . . . .|. . . .|     every fourth step
                         rank 1  . . . .|. . . .|

    LocalSGD     the mean of the parameters takes their place
    DiLoCo       the last start minus that mean is a gradient (the outer one), for an optimizer of its own, whose
                 Nesterov momentum remembers earlier rounds

Local SGD: S. Stich, ICLR 2019. DiLoCo: A. Douillard et al., arXiv:2311.08105. Names as in torchft.
"""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer


class LocalSGD:
    """``step()`` in place of ``optimizer.step()``: every ``sync_every`` steps the mean over ranks is everybody's model.

    Contract: all ranks take as many steps; no buffers; all parameters of one dtype. Rank 0's values hold at
    construction. The states of ``optimizer`` (momenta) stay each rank's own.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, optimizer: Optimizer, sync_every: int):
        self.group, self.optimizer, self.sync_every, self.steps = group, optimizer, sync_every, 0
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), group_src=0, group=group)

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.sync_every == 0:
            with torch.no_grad():
                self.synchronise()

    def synchronise(self) -> None:
        for parameter, mean in zip(self.trained, self.means(self.trained), strict=True):
            parameter.copy_(mean)

    def means(self, tensors: list) -> list[Tensor]:
        """Over ranks, in one message."""
        dist.all_reduce(flat := torch.cat([tensor.flatten() for tensor in tensors]), group=self.group)
        flat /= dist.get_world_size(self.group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


class DiLoCo(LocalSGD):
    """The same; at the end of a round ``outer_optimizer`` takes one step from where the round began.

    ``outer_optimizer`` is one of torch's over the model's parameters: ``SGD(lr=0.7, momentum=0.9, nesterov=True)`` in
    the paper. With ``SGD(lr=1)`` it is local SGD.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, inner_optimizer: Optimizer,
                 outer_optimizer: Optimizer, sync_every: int):  # fmt: skip
        super().__init__(group, model, inner_optimizer, sync_every)
        self.outer_optimizer = outer_optimizer
        self.starts = [parameter.detach().clone() for parameter in self.trained]

    def synchronise(self) -> None:
        moved = [start - now for start, now in zip(self.starts, self.trained, strict=True)]
        means = self.means(moved)  # the outer gradient
        for parameter, start, mean in zip(self.trained, self.starts, means, strict=True):
            parameter.copy_(start)  # back to where all ranks were
            parameter.grad = mean
        self.outer_optimizer.step()
        for parameter, start in zip(self.trained, self.starts, strict=True):
            start.copy_(parameter)
            parameter.grad = None


# LocalSGD and DiLoCo, in full.py, add fragments of the model that travel one after the other while the next steps are
# computed, ranks that die between two rounds, checkpoints, buffers, and several dtypes.
# contract.py refuses what lies outside of the contract above, where dtlib is installed: this file needs torch alone.
