"""Local SGD and DiLoCo for real runs: models of several dtypes with buffers, checkpoints, and checks.

    steps, sync_every = 4     1  2  3  4          5  6  7  8
                                       exchange              exchange

An exchange averages how far the ranks have moved since the last one. The outer optimizer then steps from the round's
start. Arguments as in torchft's ``DiLoCo``.
"""

from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError, number
from dtlib.gradients.same_model import check_same_arguments, check_same_model, digest_of
from dtlib.parallel.local.checks import check_optimizer


class DiLoCo:
    """``step()`` replaces ``inner_optimizer.step()``: ranks train alone and rarely exchange how far they have moved.

    Args:
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        model: an ``nn.Module``, the same on all ranks; rank 0's values are broadcast at construction.
        inner_optimizer: any optimizer that changes the model's parameters in ``step()``; its states stay local.
        outer_optimizer: a torch optimizer over the same parameters. Its gradient is the round's start minus the round's
            end, averaged over ranks. In the paper it is ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        sync_every: steps per round. Parameters are exchanged at the end of each round.

    Parameters that are added or replaced later are not averaged. Floating-point buffers are averaged, too; other
    buffers stay local. ``steps`` counts steps. Within a round, parameters differ between ranks: call ``finish()`` after
    the last step and before ``dtlib.checkpoint.save``.

    Raises:
        DtlibError: on all ranks, if models differ between ranks or arguments do not fit together.
    """

    def __init__(self, comm: AnyCommunicator, model: nn.Module, inner_optimizer: Optimizer,
                 outer_optimizer: Optimizer, sync_every: int):  # fmt: skip
        self.comm, self._who = as_communicator(comm), type(self).__name__
        self.inner_optimizer, self.outer_optimizer, self.sync_every = inner_optimizer, outer_optimizer, sync_every
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        check_same_model(named, self.comm, self._who)
        check_same_arguments(self.comm, self._who, sync_every=sync_every)
        number(f"{self._who}(sync_every=...)", sync_every, least=1, whole=True)
        for optimizer in (inner_optimizer, outer_optimizer):
            check_optimizer(self._who, model, optimizer)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.comm.broadcast(tensor)
        self.trained = list(named.values())
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.starts = [parameter.detach().clone() for parameter in self.trained]
        self.steps = self._since = 0  # steps so far, and since the last exchange
        self._stepping = False
        _guard(self)

    def step(self) -> None:
        """Take a step of the inner optimizer, and exchange at the end of a round."""
        if not self.steps:
            self._begin()
        self._stepping = True
        try:
            self.inner_optimizer.step()
        finally:
            self._stepping = False
        self.steps, self._since = self.steps + 1, self._since + 1
        if self._since == self.sync_every:
            self._exchange()

    def finish(self) -> None:
        """End the round early, so that all ranks have the same parameters. All ranks call it."""
        if self._since:
            self._exchange()

    @torch.no_grad()
    def _begin(self) -> None:
        """Start the first round from the current parameters: weights may have been loaded after construction."""
        if len(set(self.comm.all_gather_object(digest_of(self.trained)))) > 1:
            raise DtlibError(
                f"{self._who}: parameters differ between ranks before the first step, for example after "
                "load_state_dict() on only one rank: load them on all ranks, or before you create this object."
            )
        for parameter, start in zip(self.trained, self.starts, strict=True):
            start.copy_(parameter)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Take the outer step, from the round's start. The result is the same on all ranks."""
        self._since = 0
        moved = [start - parameter for start, parameter in zip(self.starts, self.trained, strict=True)]
        mean = self.comm.all_reduce(torch.cat([tensor.flatten() for tensor in [*moved, *self._buffers]]), op="mean")
        *ways, rest = mean.split([*(tensor.numel() for tensor in moved), sum(one.numel() for one in self._buffers)])
        gradients = [parameter.grad for parameter in self.trained]
        for parameter, start, way in zip(self.trained, self.starts, ways, strict=True):
            parameter.copy_(start)
            parameter.grad = way.view_as(parameter).to(parameter.dtype)
        self.outer_optimizer.step()
        for parameter, start, gradient in zip(self.trained, self.starts, gradients, strict=True):
            start.copy_(parameter)
            parameter.grad = gradient  # of the inner optimizer
        for buffer, piece in zip(self._buffers, rest.split([one.numel() for one in self._buffers]), strict=True):
            buffer.copy_(piece.view_as(buffer))

    def state_dict(self) -> dict:
        """Return this rank's state; save it together with the model and the inner optimizer of this rank."""
        outer = self.outer_optimizer.state_dict()
        return {"steps": self.steps, "since": self._since, "starts": self.starts, "outer_optimizer": outer}

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's state; all ranks call it, after they have loaded the model and the inner optimizer."""
        self.steps, self._since = state["steps"], state["since"]
        for start, saved in zip(self.starts, state["starts"], strict=True):
            start.copy_(saved)
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])


class LocalSGD(DiLoCo):
    """``DiLoCo`` with ``SGD(lr=1)`` as outer optimizer: the mean of the parameters. Counterpart: torchft's."""

    def __init__(self, comm: AnyCommunicator, model: nn.Module, optimizer: Optimizer, sync_every: int):
        super().__init__(comm, model, optimizer, torch.optim.SGD(model.parameters(), lr=1.0), sync_every)


_guards: WeakKeyDictionary = WeakKeyDictionary()  # for each inner optimizer, the hook that refuses direct steps


def _guard(local: DiLoCo) -> None:
    """Make the inner optimizer refuse a direct ``step()``, because such a step would not be counted."""
    optimizer, itself = local.inner_optimizer, ref(local)

    def refuse(*_) -> None:
        if (alive := itself()) is not None and not alive._stepping:
            raise DtlibError(
                f"{alive._who} counts steps, and averages parameters at the end of a round: call its step() instead "
                "of step() of the inner optimizer."
            )

    if optimizer in _guards:  # hook of an earlier object with this optimizer
        _guards.pop(optimizer).remove()
    _guards[optimizer] = optimizer.register_step_pre_hook(refuse)
