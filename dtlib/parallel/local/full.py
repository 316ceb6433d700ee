"""Local SGD and DiLoCo for real runs: one fragment of the model is sent at a time, while the next steps are computed.

Eight steps with ``sync_every=8``, ``fragments=2`` and ``fragment_sync_delay=2``. A fragment is sent every four steps,
and its mean is needed two steps later.

    steps         1  2  3  4  5  6  7  8  9  10
    fragment 0             sent  arrives
    fragment 1                         sent  arrives

When the mean of a fragment arrives, the outer optimizer steps. The new parameters are 1 - alpha times the result plus
alpha times this rank's own parameters. Streaming DiLoCo: A. Douillard et al., arXiv:2501.18512. Arguments as in
torchft's ``DiLoCo``.
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
    """``step()`` replaces ``inner_optimizer.step()``: ranks train alone and rarely exchange how far they have moved.

    Args:
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        model: an ``nn.Module``, the same on all ranks; rank 0's values are broadcast at construction.
        inner_optimizer: any optimizer that changes the model's parameters in ``step()``; its states stay local.
        outer_optimizer: a torch optimizer over the same parameters. Its gradient is the round's start minus the round's
            end, averaged over ranks. In the paper it is ``SGD(lr=0.7, momentum=0.9, nesterov=True)``. None for local
            SGD: the mean of the parameters.
        sync_every: steps per round. Each parameter is exchanged once per round.
        fragments: number of model parts that are sent in turn; must divide ``sync_every``.
        fragment_sync_delay: steps computed while a fragment is in flight; must be less than the steps between two
            fragments.
        fragment_update_alpha: weight of this rank's own parameters when a fragment arrives, from 0 to 1. With a delay
            and 0, the steps taken during the delay are lost for that fragment.
        progress: how pending messages progress. With ``"inline"``, ``step()`` polls: best if cores are busy. With
            ``"thread"``, a thread polls: best if cores are idle. The default depends on the parameters' device.

    Parameters that are added or replaced later are not averaged. Floating-point buffers are averaged with the last
    fragment; other buffers stay local. ``steps`` counts steps taken, and ``rounds`` counts fragments received. Within a
    round, parameters differ between ranks: call ``finish()`` after the last step and before ``dtlib.checkpoint.save``.

    Raises:
        DtlibError: on all ranks, if models differ between ranks or arguments do not fit together.
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
                f"{self._who}: ranks pass different (sync_every, fragments, fragment_sync_delay, "
                f"fragment_update_alpha), {' and '.join(map(str, sorted(everyones)))}: pass the same on all ranks."
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
        # What this rank has sent of the fragment in flight, kept for state_dict().
        self._sent: torch.Tensor | None = None
        self._background = ExitStack()
        self._stepping = False
        _guard(self)

    def step(self) -> None:
        """Take a step of the inner optimizer, then send or receive a fragment if it is due."""
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
        """Exchange the rest of the last round, so that all ranks have the same parameters. All ranks call it."""
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
        """Start the first round from the current parameters: weights may have been loaded after construction."""
        if len(set(self.comm.all_gather_object(digest_of(self.trained)))) > 1:
            raise DtlibError(
                f"{self._who}: parameters differ between ranks before the first step, for example after "
                "load_state_dict() on only one rank: load them on all ranks, or before you create this object."
            )
        for parameter, start in self.starts.items():
            start.copy_(parameter)

    def state_dict(self) -> dict:
        """Return this rank's state; within a round it differs between ranks.

        Save it together with the model and the inner optimizer of this rank.
        """
        return {
            "steps": self.steps, "rounds": self.rounds, "sent": self._sent, "starts": list(self.starts.values()),
            "outer_optimizer": self.outer_optimizer and self.outer_optimizer.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's state and send its pending fragment again.

        All ranks call it, after they have loaded the model and the inner optimizer.
        """
        if self._sent is not None:
            raise DtlibError(f"{self._who}: a fragment is in flight: load the state into a new object.")
        self.steps, self.rounds = state["steps"], state["rounds"]
        for start, saved in zip(self.starts.values(), state["starts"], strict=True):
            start.copy_(saved)
        if self.outer_optimizer:
            self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        self._sent = state["sent"] if state["sent"] is None else state["sent"].clone()
        self._go_on()

    # Sending and receiving a fragment

    @property
    def _turn(self) -> list[nn.Parameter]:
        """The fragment that is in flight or will be sent next."""
        return self.fragments[self.rounds % len(self.fragments)]

    def _buffers_of_turn(self) -> list[torch.Tensor]:
        return self._buffers if self._turn is self.fragments[-1] else []

    @torch.no_grad()
    def _own(self) -> torch.Tensor:
        """Return what this rank sends: the round's start minus its parameters now, and its buffers."""
        ways = [self.starts[parameter] - parameter for parameter in self._turn]
        return torch.cat([tensor.flatten() for tensor in [*ways, *self._buffers_of_turn()]])

    def _go_on(self) -> None:
        """Send the fragment if it has not been sent, and wait for its mean if it is due."""
        if self._sent is None:
            return
        if self._handle is None:
            if self.delay and self._progress == "thread":
                self._background.enter_context(progress_thread())
            self._mean = self._sent.clone()  # all-reduce a copy: state_dict() needs the sent values
            self._handle = self.comm.all_reduce(self._mean, op="mean", async_op=True)
        if self.steps % self._gap == self.delay:
            self._handle.wait()
            self._arrive(self._mean)
        elif self._progress == "inline":
            advance_all()

    @torch.no_grad()
    def _arrive(self, mean: torch.Tensor) -> None:
        """Take the outer step on a fragment, from the round's start. The result is the same on all ranks."""
        fragment, buffers = self._turn, self._buffers_of_turn()
        self._background.close()
        self._sent = self._handle = None
        pieces = mean.split([tensor.numel() for tensor in [*fragment, *buffers]])
        own = {parameter: (parameter.detach().clone(), parameter.grad) for parameter in fragment}
        others = [(parameter, parameter.grad) for parameter in self.trained if parameter not in own]
        # The outer optimizer has all parameters. Without a gradient, it skips the parameters of other fragments.
        for parameter, _ in others:
            parameter.grad = None
        for parameter, way in zip(fragment, pieces, strict=False):
            parameter.copy_(self.starts[parameter])
            parameter.grad = way.view_as(parameter).to(parameter.dtype, copy=True)
        self._outer_step(fragment)
        for parameter in fragment:
            self.starts[parameter].copy_(parameter)
            # Keep a share of this rank's own progress, and restore the gradients of the inner optimizer.
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
                raise DtlibError(f"{self._who}({name}={value!r}): pass a whole number from {least} on.")
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
                raise DtlibError(f"{self._who}: {type(optimizer).__name__} lacks {missing}: give it all parameters.")


class LocalSGD(DiLoCo):
    """``DiLoCo`` without an outer optimizer: the mean of the parameters. Counterpart: torchft's ``LocalSGD``."""

    def __init__(self, comm: AnyCommunicator, model: nn.Module, optimizer: Optimizer, sync_every: int,
                 fragments: int = 1, fragment_sync_delay: int = 0, fragment_update_alpha: float = 0.0,
                 progress: str | None = None):  # fmt: skip
        rest = fragments, fragment_sync_delay, fragment_update_alpha, progress
        super().__init__(comm, model, optimizer, None, sync_every, *rest)


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
    if hasattr(optimizer, "register_step_pre_hook"):
        _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def _parts(parameters: list, number: int) -> list[list]:
    """Divide parameters into consecutive parts of similar size. Each part has at least one parameter."""
    parts: list[list] = [[] for _ in range(number)]
    total, before = sum(parameter.numel() for parameter in parameters), 0
    for left, parameter in zip(range(len(parameters), 0, -1), parameters, strict=True):
        filled = sum(map(bool, parts))
        wanted = min(number - 1, (before + parameter.numel() // 2) * number // max(total, 1))
        # Leave no part empty: do not skip a part, and keep one parameter for each of the remaining parts.
        parts[max(min(wanted, filled), number - left)].append(parameter)
        before += parameter.numel()
    return parts
