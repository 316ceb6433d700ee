"""ZeRO stages 1 and 2: every rank keeps the whole model, and updates an equal shard of it.

Data parallelism keeps the optimizer's states, and does its work, N times over. Here each rank owns 1/N of the flat
parameters. Two steps take the place of the all-reduce, and together send as much:

    gradients     reduce_scatter    rank r gets the average of its shard
                  optimizer.step()  on that shard alone, with states for that shard alone
    parameters    all_gather        everybody has all the new values

Stage 1 keeps all gradients until ``step()`` and reduces them there. Stage 2 reduces them in buckets during the backward
pass and frees them, so that each rank keeps the averages of its own shard only; it therefore sends gradients after
every backward pass, where stage 1 sends them once a step.

                        bytes a parameter in float32 with Adam, on N ranks
    data parallelism    4 + 4 + 8
    stage 1             4 + 4 + 8/N
    stage 2             4 + (4 + 8)/N

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import bucket_bytes, buckets_of
from dtlib.gradients.local_gradient import drop_placeholder, is_gone
from dtlib.gradients.precision import MasterWeights, clip_by_norm, refuse_shards
from dtlib.gradients.reducer import Reducer, ReduceScatter, progress_for, refuse_averaged
from dtlib.gradients.same_model import check_same_model
from dtlib.parallel.zero.arguments import check_arguments
from dtlib.parallel.zero.sharded_bucket import ShardedBucket, WholeGradients, names_of
from dtlib.world import init

MASTER = "master"  # of a parameter in 16 bits
COUNTERS = ("step", "eta", "mu", "mu_product")  # one number a parameter, even if that has no dimension itself


class ZeroOptimizer(optim.Optimizer):
    """An optimizer whose states, at stage 2 with the gradients, are shared out among the ranks of ``comm``.

    ``loss.backward()`` stays as it is, and the model needs no wrapper. ``step()`` averages gradients over ranks,
    updates this rank's shard, and gives everybody the new values.

    Args:
        params: parameters, or groups of them, as for any optimizer; also ``model.named_parameters()``, so that errors
            can name them. Rank 0's values are broadcast at construction. Those that do not require gradients are left
            alone.
        optimizer_class: an element-wise optimizer of torch, such as ``torch.optim.AdamW``, or a subclass with its
            ``step``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``; by default that of
            ``dtlib.init()``.
        stage: 1 shares out the optimizer's states, 2 the gradients as well.
        bucket_cap_mb: stage 2 sends gradients in buckets of this many MiB, by default as large as the largest
            parameter, and not more than 25. One of them travels at a time.
        offload: keep master weights and optimizer states in host memory and step there (ZeRO-Offload, J. Ren et al.,
            USENIX ATC 2021). Without a GPU there is no other memory, and it says so.
        progress: who moves the buckets of stage 2 on during the backward pass, as for ``DataParallel``.
        **defaults: passed to ``optimizer_class``.

    Parameters in 16 bits get master weights in float32, for this rank's shard alone.

    ``optimizer.batch_size = len(x)`` before a backward pass weights this rank's gradients by its samples; a rank
    without samples sets it to 0 and calls ``step()`` without a backward pass. A parameter that no rank has used is left
    alone. ``step()`` uses gradients up: they are None afterwards. At stage 2 they leave in ``backward()`` already, and
    placeholders stand in that refuse to be read: ``optimizer.zero_grad()`` drops the averages and ``model.zero_grad()``
    cannot. Clip with ``optimizer.clip_grad_norm_``: before ``step()`` no rank has the averages that torch's function
    looks for, and that is refused.

    Counterparts: ``torch.distributed.optim.ZeroRedundancyOptimizer``, which is stage 1 and needs
    ``DistributedDataParallel`` beside it; DeepSpeed's ZeRO stages 1 and 2.

    Raises:
        DtlibError: for an optimizer that is not element-wise, a stage that is none, parameters that differ between
            ranks, or whose type cannot be averaged; in ``step()`` for parameters that were unfrozen or converted since.
    """

    optim: torch.optim.Optimizer  # the local optimizer, which has this rank's shards only

    def __init__(
        self, params: Iterable, optimizer_class: type, comm: AnyCommunicator | None = None, stage: int = 1,
        bucket_cap_mb: float | None = None, offload: bool = False, progress: str | None = None, **defaults: object,
    ):  # fmt: skip
        check_arguments(optimizer_class, stage, bucket_cap_mb, progress)
        self.comm = as_communicator(init().comm if comm is None else comm)
        self.stage, self.batch_size, self.forwards = stage, None, 0
        self._offload, self._wanted_progress = offload, progress
        self._cap_mb = bucket_cap_mb
        self._buckets: list[ShardedBucket] = []
        self._names: dict[nn.Parameter, str] = {}
        self._shard_of: dict[nn.Parameter, tuple] = {}
        self._reduced = False  # gradients have been averaged, and step() need not do it
        self._whole_state: dict | None = None
        self.masters = MasterWeights([])
        super().__init__(params, optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults)
        local = [self._share_out(number) for number in range(len(self.param_groups))]
        self.optim = optimizer_class(local, **defaults)
        self._connect()

    def add_param_group(self, param_group: dict) -> None:
        """Between ``step()`` and the next backward pass, on all ranks: train these parameters, too."""
        is_made = hasattr(self, "optim")  # else it is a group of the constructor's
        if is_made and self._in_the_middle():
            raise DtlibError("A group cannot be added while gradients wait: call step() or zero_grad() first.")
        super().add_param_group(param_group)
        if is_made:
            self.optim.add_param_group(self._share_out(len(self.param_groups) - 1))
            self._connect()

    def _share_out(self, number: int) -> dict:
        """Lay a group's parameters into flat memory; returns what the local optimizer has of it."""
        group = self.param_groups[number]
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        names = names_of(number, group)
        check_same_model({names[parameter]: parameter for parameter in trained}, self.comm, "ZeroOptimizer")
        for parameter in group["params"]:
            if not parameter.requires_grad:
                self.comm.broadcast(parameter)
        # Gradients come roughly in the reverse order of the forward pass; stage 1 has no hurry and sends all at once.
        order = trained[::-1]
        cap = bucket_bytes(order, self._cap_mb) if self.stage == 2 else 2**63
        # A large gradient travels from its own memory.
        indices = buckets_of(order, cap, cap, alone_from=cap / 2 if self.stage == 2 else cap)
        kind = WholeGradients if self.stage == 1 else ShardedBucket
        buckets = [kind([order[i] for i in some], self.comm) for some in indices]
        owned = {p: piece for bucket in buckets for p, piece in zip(bucket.parameters, bucket.owned, strict=True)}
        on_gpu = any(parameter.is_cuda for parameter in trained)
        if self._offload and not on_gpu:
            warnings.warn("offload: there is no GPU here, so states are in host memory anyway.", stacklevel=3)
        made = MasterWeights(owned.values(), "cpu" if self._offload and on_gpu else None, wholes=owned)
        self.masters += made
        slices = [slice_ for bucket in buckets for slice_ in bucket.shards.slices]
        for parameter, slice_, master in zip(owned, slices, made.masters, strict=True):
            self._shard_of[parameter] = slice_, owned[parameter], master
        self._buckets += buckets
        self._names |= names
        # A scheduler changes param_groups, which the local optimizer follows.
        return {**_settings_of(group), "params": [self._shard_of[parameter][2] for parameter in trained]}

    def _connect(self) -> None:
        """Have autograd tell of gradients."""
        self.progress = progress_for(self.comm, self._shard_of, self._wanted_progress, "ZeroOptimizer")
        self._reducer = Reducer(
            self._buckets, ReduceScatter(self.comm), self, self.progress, self._names, by_call=self.stage == 1,
            values=list(self._names),
        )  # fmt: skip
        for bucket in self._buckets:
            keep = bucket.keep if isinstance(bucket, WholeGradients) else self._reducer.gradient_is_ready
            for parameter in bucket.parameters:
                if parameter in _hooks:  # of an earlier optimizer of the same parameter
                    _hooks[parameter].remove()
                if self.stage == 2:
                    refuse_averaged({self._names[parameter]: parameter})
                _hooks[parameter] = parameter.register_post_accumulate_grad_hook(keep)

    # Gradients

    def reduce_gradients(self, scale: float = 1.0) -> None:
        """Average gradients over ranks and divide them by ``scale``, if that has not been done since the last step.

        ``step()`` does it by itself; it is here for who wants to look at ``masters`` in between.
        """
        if self._reduced:
            return
        self._check_parameters()
        self._reducer.check()
        if not self._reducer.passes:
            self._reducer.end()
        for bucket in self._buckets:
            assert bucket.average is not None
            for piece, view, ranks in zip(
                bucket.owned, bucket.shards.views(bucket.average), bucket.used_anywhere, strict=True
            ):
                piece.grad = view if ranks else None
        self.masters.take_gradients(scale)
        self._reduced = True

    def _check_parameters(self) -> None:
        """Refuse what would go wrong without a word."""
        for parameter, name in self._names.items():
            if parameter.requires_grad and parameter not in self._shard_of:
                raise DtlibError(
                    f"{name} was frozen when ZeroOptimizer was made and is trained now: make a new ZeroOptimizer, or "
                    "add it with add_param_group once it is unfrozen."
                )
            if self.stage == 2 and not is_gone(parameter.grad):
                raise DtlibError(
                    f"{name} has a gradient that did not come from a backward pass through this optimizer's hooks: "
                    "stage 2 takes no gradients by hand, nor those of DataParallel; use stage 1, or no DataParallel."
                )
        for bucket in self._buckets:
            bucket.check(self._names)

    def _in_the_middle(self) -> bool:
        """Gradients have arrived, and wait for the step."""
        waiting = any(not is_gone(parameter.grad) for parameter in self._shard_of)
        return waiting or self._reduced or bool(self._reducer.passes)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Between ``backward()`` and ``step()``: scale all gradients down together so that their joint norm, over the
        shards of all ranks, is at most ``max_norm``; returns the norm before. ``norm_type`` may be ``inf``.

        Raises:
            DtlibError: for parameters that tensor parallelism has cut, as their other shards are not here.
        """
        refuse_shards((p for group in self.param_groups for p in group["params"]), f"clip_grad_norm_({max_norm})")
        self.reduce_gradients()
        gradients = [master.grad for master in self.masters.masters]
        return clip_by_norm(gradients, max_norm, self.comm, norm_type=norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for tensor in [*self.masters.parameters, *self.masters.masters]:
            tensor.grad = None
        for parameter in self._shard_of:
            drop_placeholder(parameter)
        self._reducer.check()
        self._reducer.forget()
        self._reduced = False

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average the gradients, update this rank's shard, and give every rank all the new values.

        ``closure`` computes the loss anew and calls ``backward()``; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for mine, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            local.update(_settings_of(mine))  # a scheduler may have changed them
        self.optim.step()
        self._whole_state = None
        self.give_values()
        self._forget_gradients()
        return loss

    def give_values(self) -> None:
        """Give every rank's model the values of all shards, after shards have been changed from outside."""
        self.masters.give_values()
        for bucket in self._buckets:
            whole = bucket.values.flat
            self.comm.all_gather(whole, bucket.shards.own(whole))

    # What others may want to know

    def shard_of(self, parameter: nn.Parameter) -> tuple | None:
        """The shard of a parameter that this rank updates: a ``flat.Slice``, its value, and what the local optimizer
        ``optim`` knows it as (its float32 master, if the parameter has 16 bits). None for one that is not trained."""
        return self._shard_of.get(parameter)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Memory that this optimizer keeps beside its states, by what it is for (measure/held.py)."""
        return {
            "parameters": [view for bucket in self._buckets for view in bucket.values.views],
            "gradients": [view for bucket in self._buckets for view in bucket.gradients()],
            "masters": self.masters.masters,
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the states of all shards on rank ``to``, whose ``state_dict()`` is whole until the next ``step()``.

        All ranks call it. The whole one is what ``optimizer_class`` itself would give for all parameters, and any
        number of ranks takes it; of parameters in 16 bits it has the ``master``, too.
        """
        self._whole_state = _whole_state_of(self, to)

    def state_dict(self) -> dict:
        """This rank's shard; ``load_state_dict`` takes it on the same rank of as many ranks. dtlib.checkpoint knows how
        to move between numbers of ranks. On the rank of ``consolidate_state_dict`` the whole."""
        if self._whole_state is not None:
            return self._whole_state
        return {
            "rank": self.comm.rank,
            "size": self.comm.size,
            "optimizer": self.optim.state_dict(),
            "masters": [master.detach() for master in self.masters.masters],
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Take this rank's shard, or on all ranks the same whole state, which may be of ``optimizer_class`` itself."""
        if self._in_the_middle():
            raise DtlibError("A state cannot be loaded while gradients are pending: call step() or zero_grad() first.")
        self._whole_state = None
        _load_state(self, state_dict)
        self.give_values()


_hooks = WeakTensorKeyDictionary()  # of each parameter, that of its ZeroOptimizer


# The state as one optimizer of all parameters would have it, gathered from shards and cut up.
#
#     shard of rank 0   exp_avg[0:4]  \
#     shard of rank 1   exp_avg[4:8]   }  exp_avg in the shape of the parameter; numbers such as step are alike on all


def _whole_state_of(zero, to: int) -> dict | None:
    """On rank ``to`` the dictionary that torch's ``state_dict`` would be, in host memory; None on the others."""
    if not 0 <= to < zero.comm.size:
        raise DtlibError(f"consolidate_state_dict(to={to}): choose a rank from 0 to {zero.comm.size - 1}.")
    whole = optim.Optimizer.state_dict(zero)
    whole["state"] = {}
    for i, parameter in enumerate(_parameters(zero)):
        if parameter not in zero._shard_of:
            continue
        slice_, value, master = zero._shard_of[parameter]
        mine = {key: _on_host(state) for key, state in zero.optim.state.get(master, {}).items()}
        if master is not value:
            mine[MASTER] = _on_host(master)
        cut = {key for key, state in mine.items() if isinstance(state, torch.Tensor) and state.dim() == 1}
        everyones = zero.comm.all_gather_object(mine)  # one parameter at a time, so that no rank holds all but one
        if zero.comm.rank == to and mine:
            whole["state"][i] = {
                key: torch.cat([theirs[key] for theirs in everyones]).view(slice_.shape) if key in cut else state
                for key, state in mine.items()
            }
    return whole if zero.comm.rank == to else None


def _take_whole_state(zero, whole: dict) -> None:
    """Cut a whole state and give the local optimizer its shard."""
    optim.Optimizer.load_state_dict(zero, {**whole, "state": {}})
    local = zero.optim.state_dict()
    places = {master: i for i, master in enumerate(p for group in zero.optim.param_groups for p in group["params"])}
    for mine, theirs in zip(local["param_groups"], zero.param_groups, strict=True):
        mine.update(_settings_of(theirs))
    local["state"] = {}
    for i, parameter in enumerate(_parameters(zero)):
        if parameter not in zero._shard_of:
            continue
        slice_, value, master = zero._shard_of[parameter]
        state = dict(whole["state"].get(i, {}))
        saved = state.pop(MASTER, parameter)
        if master is not value:
            with torch.no_grad():
                master.copy_(saved.reshape(-1)[slice_.start : slice_.stop])
        if state:
            local["state"][places[master]] = {key: _cut(key, one, slice_) for key, one in state.items()}
    zero.optim.load_state_dict(local)


def _load_state(zero, state_dict: dict) -> None:
    """Take this rank's shard, or the whole."""
    if "param_groups" in state_dict:
        return _take_whole_state(zero, state_dict)
    place = state_dict.get("rank"), state_dict.get("size")
    if place != (zero.comm.rank, zero.comm.size):
        raise DtlibError(
            f"This state belongs to rank {place[0]} of {place[1]}, but this is rank {zero.comm.rank} of "
            f"{zero.comm.size}: use dtlib.checkpoint, which supports other numbers, or consolidate_state_dict."
        )
    zero.optim.load_state_dict(state_dict["optimizer"])
    with torch.no_grad():
        for master, saved in zip(zero.masters.masters, state_dict["masters"], strict=True):
            master.copy_(saved)
    for mine, local in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        mine.update(_settings_of(local))


def _settings_of(group: dict) -> dict:
    """Learning rate and the like of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _on_host(state):
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def _cut(key: str, state, slice_):
    """Memory of its own: a view would keep the whole, and torch's optimizers write into what they have loaded."""
    if not isinstance(state, torch.Tensor):
        return state
    is_whole = key not in COUNTERS and tuple(state.shape) == slice_.shape
    return (state.reshape(-1)[slice_.start : slice_.stop] if is_whole else state).clone()


def _parameters(zero) -> list:
    """In the order in which torch numbers them."""
    return [parameter for group in zero.param_groups for parameter in group["params"]]
