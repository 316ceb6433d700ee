"""Local SGD and DiLoCo as runs need them: a fragment of the model at a time, while the next steps are computed.

Eight steps with ``sync_every=8``, ``fragments=2`` and ``fragment_sync_delay=2``: a fragment leaves every four steps,
and is waited for two steps later.

    steps         1  2  3  4  5  6  7  8  9  10
    fragment 0             leaves  arrives
    fragment 1                         leaves  arrives

Where it arrives, the outer optimizer takes its step, and parameters become 1 - alpha of that and alpha of their own.
Streaming DiLoCo: A. Douillard et al., arXiv:2501.18512. Arguments as in torchft's ``DiLoCo``.
"""

from contextlib import ExitStack
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.comm import AnyCommunicator, as_communicator, progress_thread
from dtlib.comm.waiting import Operation, advance_all
from dtlib.errors import DtlibError
from dtlib.gradients.reducer import progress_for
from dtlib.gradients.same_model import check_same_model, digest_of


class DiLoCo:
    """``step()`` in place of ``inner_optimizer.step()``: ranks train alone, and seldom exchange how far they have come.

    Args:
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        model: an ``nn.Module``, the same on all ranks; rank 0's values are broadcast at construction.
        inner_optimizer: any that changes the model's parameters in ``step()``; its states stay each rank's own.
        outer_optimizer: one of torch's over the same parameters, whose gradient is the mean over ranks of the way from
            the round's end back to its start: ``SGD(lr=0.7, momentum=0.9, nesterov=True)`` in the paper. None for
            local SGD: the mean of the parameters.
        sync_every: steps of a round: each parameter is exchanged once in it.
        fragments: parts of the model that leave one after the other; it divides ``sync_every``.
        fragment_sync_delay: steps that are computed while a fragment travels; less than from one to the next.
        fragment_update_alpha: how much of this rank's own parameters is kept where a fragment arrives; 0 to 1. With a
            delay and 0 the steps of the delay are lost.
        progress: who moves on what travels: ``"inline"``, right where the cores compute, or ``"thread"``, right where
            they are idle; by default by the device of the parameters.

    Floating-point buffers are averaged with the last fragment; others stay each rank's own. ``steps`` are done, and
    ``rounds`` counts fragments that have arrived. Within a round ranks differ: call ``finish()`` after the last step,
    and before ``dtlib.checkpoint.save``.

    Raises:
        DtlibError: on all ranks, for models that differ, or arguments that do not fit together.
    """

    def __init__(self, comm: AnyCommunicator, model: nn.Module, inner_optimizer: Optimizer,
                 outer_optimizer: Optimizer | None, sync_every: int, fragments: int = 1, fragment_sync_delay: int = 0,
                 fragment_update_alpha: float = 0.0, progress: str | None = None):  # fmt: skip
        self.comm, self._who = as_communicator(comm), type(self).__name__
        self.inner_optimizer, self.outer_optimizer = inner_optimizer, outer_optimizer
        self.sync_every, self.delay, self.alpha = sync_every, fragment_sync_delay, fragment_update_alpha
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        check_same_model(named, self.comm, self._who)
        asked = sync_every, fragments, fragment_sync_delay, fragment_update_alpha
        if len(everyones := set(self.comm.all_gather_object(asked))) > 1:
            raise DtlibError(
                f"{self._who}: ranks ask for (sync_every, fragments, fragment_sync_delay, fragment_update_alpha) of "
                f"{' and '.join(map(str, sorted(everyones)))}: give the same on all ranks."
            )
        self._check(named, fragments)
        self._progress = progress_for(self.comm, named.values(), progress, self._who)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.comm.broadcast(tensor)
        self.trained = list(named.values())
        self.fragments = _parts(self.trained, fragments)
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.starts = {parameter: parameter.detach().clone() for parameter in self.trained}
        self.steps = self.rounds = 0
        self._handle: Operation | None = None
        self._sent: torch.Tensor | None = None  # of the fragment that is under way: what this rank has sent
        self._background = ExitStack()
        self._stepping = False
        _guard(self)

    def step(self) -> None:
        """A step of the inner optimizer; at its turn, a fragment leaves or arrives."""
        if not self.steps:
            self._begin()
        self._stepping = True
        try:
            self.inner_optimizer.step()
        finally:
            self._stepping = False
        self.steps += 1
        if self.steps % self._gap == 0:
            self._sent = self._own()
        self._go_on()

    def finish(self) -> None:
        """After the last step: exchange what the last round has not, so that all ranks have the same parameters. All
        ranks call it."""
        alpha, self.alpha = self.alpha, 0.0
        if self._handle is not None:
            self._handle.wait()
            self._arrive(self._mean)
        if self.steps % self.sync_every or len(self.fragments) > 1 or self.delay or alpha:
            for _ in self.fragments:
                self._arrive(self.comm.all_reduce(self._own(), op="mean"))
        self.alpha = alpha

    @torch.no_grad()
    def _begin(self) -> None:
        """The first round starts from what the model has now: weights may have been loaded since it was wrapped."""
        if len(set(self.comm.all_gather_object(digest_of(self.trained)))) > 1:
            raise DtlibError(
                f"{self._who}: parameters differ between ranks before the first step, for example after "
                "load_state_dict() on only one rank: load them on all ranks, or before you create this object."
            )
        for parameter, start in self.starts.items():
            start.copy_(parameter)

    def state_dict(self) -> dict:
        """Of this rank; save it beside the model and the inner optimizer, which are each rank's own within a round."""
        return {
            "steps": self.steps, "rounds": self.rounds, "sent": self._sent, "starts": list(self.starts.values()),
            "outer_optimizer": self.outer_optimizer and self.outer_optimizer.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """All ranks load theirs, after the model and the inner optimizer; what was under way is sent again."""
        if self._sent is not None:
            raise DtlibError(f"{self._who}: a fragment is under way: load into one that was just made.")
        self.steps, self.rounds = state["steps"], state["rounds"]
        for start, saved in zip(self.starts.values(), state["starts"], strict=True):
            start.copy_(saved)
        if self.outer_optimizer:
            self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        self._sent = state["sent"] if state["sent"] is None else state["sent"].clone()
        self._go_on()

    # A fragment leaves, and arrives

    @property
    def _turn(self) -> list[nn.Parameter]:
        """The fragment that leaves next, or is under way."""
        return self.fragments[self.rounds % len(self.fragments)]

    def _buffers_of_turn(self) -> list[torch.Tensor]:
        return self._buffers if self._turn is self.fragments[-1] else []

    @torch.no_grad()
    def _own(self) -> torch.Tensor:
        """What this rank sends: the way back from its parameters to where they started."""
        ways = [self.starts[parameter] - parameter for parameter in self._turn]
        return torch.cat([tensor.flatten() for tensor in [*ways, *self._buffers_of_turn()]])

    def _go_on(self) -> None:
        """Send what is to be sent, and wait for it if it is due."""
        if self._sent is None:
            return
        if self._handle is None:
            if self.delay and self._progress == "thread":
                self._background.enter_context(progress_thread())
            self._mean = self._sent.clone()  # what was sent stays as it was, for state_dict
            self._handle = self.comm.all_reduce(self._mean, op="mean", async_op=True)
        if self.steps % self._gap == self.delay:
            self._handle.wait()
            self._arrive(self._mean)
        elif self._progress == "inline":
            advance_all()

    @torch.no_grad()
    def _arrive(self, mean: torch.Tensor) -> None:
        """The outer step on a fragment, from where it started: the same on all ranks."""
        fragment, buffers = self._turn, self._buffers_of_turn()
        self._background.close()
        self._sent = self._handle = None
        pieces = mean.split([tensor.numel() for tensor in [*fragment, *buffers]])
        own = {parameter: (parameter.detach().clone(), parameter.grad) for parameter in fragment}
        others = [(parameter, parameter.grad) for parameter in self.trained if parameter not in own]
        for parameter, _ in others:
            parameter.grad = None  # the outer optimizer leaves it alone
        for parameter, way in zip(fragment, pieces, strict=False):
            parameter.copy_(self.starts[parameter])
            parameter.grad = way.view_as(parameter).to(parameter.dtype, copy=True)
        self._outer_step(fragment)
        for parameter in fragment:
            self.starts[parameter].copy_(parameter)
            parameter.lerp_(own[parameter][0], self.alpha)
        for parameter, gradient in [*others, *((parameter, gradient) for parameter, (_, gradient) in own.items())]:
            parameter.grad = gradient
        for buffer, piece in zip(buffers, pieces[len(fragment) :], strict=True):
            buffer.lerp_(piece.view_as(buffer).to(buffer.dtype), 1 - self.alpha)
        self.rounds += 1

    def _outer_step(self, fragment) -> None:
        if self.outer_optimizer is not None:
            self.outer_optimizer.step()
            return
        for parameter in fragment:
            parameter -= parameter.grad

    def _check(self, named: dict, fragments: int) -> None:
        for name, value, least in (("sync_every", self.sync_every, 1), ("fragments", fragments, 1)):
            if not isinstance(value, int) or value < least:
                raise DtlibError(f"{self._who}({name}={value!r}): give a whole number from {least} on.")
        if self.sync_every % fragments or fragments > len(named):
            raise DtlibError(
                f"{self._who}(sync_every={self.sync_every}, fragments={fragments}): fragments leave evenly spaced, so "
                f"their number divides sync_every, and this model has {len(named)} trained parameters at most to part."
            )
        self._gap = self.sync_every // fragments
        if not 0 <= self.delay < self._gap:
            raise DtlibError(
                f"{self._who}(fragment_sync_delay={self.delay}): a fragment is sent every {self._gap} steps, and must "
                f"arrive before the next: pass 0 to {self._gap - 1}."
            )
        if not 0 <= self.alpha <= 1:
            raise DtlibError(f"{self._who}(fragment_update_alpha={self.alpha}): pass 0 to 1.")
        for optimizer in (self.inner_optimizer, self.outer_optimizer):
            groups = getattr(optimizer, "param_groups", [])
            known = {parameter for group in groups for parameter in group["params"]}
            if optimizer is not None and not known >= set(named.values()):
                missing = next(name for name, parameter in named.items() if parameter not in known)
                raise DtlibError(f"{self._who}: {type(optimizer).__name__} has not {missing}: give it all parameters.")


class LocalSGD(DiLoCo):
    """``DiLoCo`` without an outer optimizer: the mean of the parameters. Counterpart: torchft's ``LocalSGD``."""

    def __init__(self, comm: AnyCommunicator, model: nn.Module, optimizer: Optimizer, sync_every: int,
                 fragments: int = 1, fragment_sync_delay: int = 0, fragment_update_alpha: float = 0.0,
                 progress: str | None = None):  # fmt: skip
        rest = fragments, fragment_sync_delay, fragment_update_alpha, progress
        super().__init__(comm, model, optimizer, None, sync_every, *rest)


_guards: WeakKeyDictionary = WeakKeyDictionary()  # of each inner optimizer, a hook


def _guard(local: DiLoCo) -> None:
    """Have the inner optimizer refuse steps that are not counted."""
    optimizer, itself = local.inner_optimizer, ref(local)

    def refuse(*_) -> None:
        if (alive := itself()) is not None and not alive._stepping:
            raise DtlibError(
                f"{alive._who} counts steps, and averages parameters at the end of a round: call its step() instead "
                "of step() of the inner optimizer."
            )

    if optimizer in _guards:  # of an earlier object with the same optimizer
        _guards.pop(optimizer).remove()
    if hasattr(optimizer, "register_step_pre_hook"):
        _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def _parts(parameters: list, number: int) -> list[list]:
    """Neighbours together, in parts of about as many elements; each has a parameter at least."""
    parts: list[list] = [[] for _ in range(number)]
    total, before = sum(parameter.numel() for parameter in parameters), 0
    for left, parameter in zip(range(len(parameters), 0, -1), parameters, strict=True):
        filled = sum(map(bool, parts))
        wanted = min(number - 1, (before + parameter.numel() // 2) * number // max(total, 1))
        # Neither is a part left out, nor one that follows left without a parameter.
        parts[max(min(wanted, filled), number - left)].append(parameter)
        before += parameter.numel()
    return parts
