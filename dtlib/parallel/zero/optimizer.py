"""ZeRO stages 1 and 2: every rank keeps the whole model, and updates an equal part of it.

Data parallelism keeps the optimizer's states, and does its work, N times over. Here each rank owns 1/N of the flat
parameters. Two steps take the place of the all-reduce, and together send as much:

    gradients     reduce_scatter    rank r gets the average of its part
                  optimizer.step()  on that part alone, with states for that part alone
    parameters    all_gather        everybody has all the new values

Stage 1 keeps all gradients until ``step()`` and reduces them there. Stage 2 reduces them in buckets during the backward
pass and frees them, so that each rank keeps the averages of its own part only; it therefore sends gradients after every
backward pass, where stage 1 sends them once a step.

                        bytes a parameter in float32 with Adam, on N ranks
    data parallelism    4 + 4 + 8
    stage 1             4 + 4 + 8/N
    stage 2             4 + (4 + 8)/N

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.
"""

import warnings

import torch
from torch import nn, optim

from dtlib.backward import progress_for
from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.flat import FIRST_BUCKET, MEBIBYTE, FlatBuffer, Shards, buckets_of
from dtlib.precision import MasterWeights, clip_by_norm, refuse_parts
from dtlib.reduction import GradientShard, Reducer, check_dense, exchange_used, share_by_samples
from dtlib.same_model import check_same_model

# Optimizers whose update of an element depends on nothing but that element: a part of a parameter is like a whole one.
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
STAGES = (1, 2)


class ZeroOptimizer(optim.Optimizer):
    """An optimizer whose states, at stage 2 with the gradients, are shared out among the ranks of ``comm``.

    ``loss.backward()`` stays as it is, and the model needs no wrapper. ``step()`` averages gradients over ranks,
    updates this rank's part, and gives everybody the new values.

    Args:
        params: parameters, or groups of them, as for any optimizer; also ``model.named_parameters()``, so that errors
            can name them. Rank 0's values are broadcast at construction. Those that do not require gradients are left
            alone.
        optimizer_class: an element-wise optimizer of torch, such as ``torch.optim.AdamW``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        stage: 1 shares out the optimizer's states, 2 the gradients as well.
        bucket_cap_mb: stage 2 sends gradients in buckets of this many MiB, the first of at most 1 MiB.
        offload: keep master weights and optimizer states in host memory and step there (ZeRO-Offload, J. Ren et al.,
            USENIX ATC 2021). Without a GPU there is no other memory, and it says so.
        progress: who moves the buckets of stage 2 on during the backward pass, as for ``DataParallel``.
        **defaults: passed to ``optimizer_class``.

    Parameters in 16 bits get master weights in float32, for this rank's part alone.

    ``optimizer.batch_size = len(x)`` before a backward pass weights this rank's gradients by its samples; a rank
    without samples sets it to 0 and calls ``step()`` without a backward pass. A parameter that no rank has used is left
    alone. ``step()`` uses gradients up: they are None afterwards, and at stage 2 after ``backward()`` already. Clip
    with ``optimizer.clip_grad_norm_``: before ``step()`` no rank has the averages that torch's function looks for.

    Counterparts: ``torch.distributed.optim.ZeroRedundancyOptimizer``, which is stage 1 and needs
    ``DistributedDataParallel`` beside it; DeepSpeed's ZeRO stages 1 and 2.

    Raises:
        DtlibError: for an optimizer that is not element-wise, a stage that is none, parameters that differ between
            ranks, or whose type cannot be averaged.
    """

    def __init__(
        self, params, optimizer_class, comm, stage: int = 1, bucket_cap_mb: float = 25, offload: bool = False,
        progress: str | None = None, **defaults,
    ):  # fmt: skip
        if optimizer_class not in ELEMENTWISE:
            name, known = getattr(optimizer_class, "__name__", optimizer_class), (kind.__name__ for kind in ELEMENTWISE)
            raise DtlibError(
                f"ZeroOptimizer cuts parameters anywhere, and {name} is not known to work element by element: choose "
                f"one of {', '.join(known)}."
            )
        if stage not in STAGES:
            raise DtlibError(
                f"ZeroOptimizer(stage={stage!r}): choose 1 or 2; stage 3 is fully_shard in dtlib.parallel.sharded."
            )
        if bucket_cap_mb <= 0:
            raise DtlibError(f"ZeroOptimizer(bucket_cap_mb={bucket_cap_mb}): give a size above 0, such as 25.")
        self.comm = as_communicator(comm)
        self.stage, self.batch_size = stage, None
        self._buckets = None
        super().__init__(params, optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults)
        groups = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        names = _names_of(self.param_groups)
        if not names:
            raise DtlibError("ZeroOptimizer: no parameter requires a gradient, so there is nothing to share out.")
        check_same_model({name: parameter for parameter, name in names.items()}, self.comm, "ZeroOptimizer")
        self.progress = progress_for(self.comm, names, progress, "ZeroOptimizer")
        for parameter in (p for group in self.param_groups for p in group["params"] if not p.requires_grad):
            self.comm.broadcast(parameter)
        # Gradients come roughly in the reverse order of the forward pass; stage 1 has no hurry and sends all at once.
        cap = int(bucket_cap_mb * MEBIBYTE) if stage == 2 else float("inf")
        self._buckets = [
            Bucket([group[i] for i in indices], self.comm, stage)
            for group in (group[::-1] for group in groups)
            for indices in buckets_of(group, cap, min(cap, FIRST_BUCKET) if stage == 2 else cap)
        ]
        owned = {p: piece for bucket in self._buckets for p, piece in zip(bucket.parameters, bucket.owned, strict=True)}
        on_gpu = any(parameter.is_cuda for parameter in names)
        if offload and not on_gpu:
            warnings.warn("offload: there is no GPU here, so states are in host memory anyway.", stacklevel=2)
        self.masters = MasterWeights(owned.values(), "cpu" if offload and on_gpu else None)
        known = dict(zip(owned, self.masters.masters, strict=True))
        parts = (part for bucket in self._buckets for part in bucket.shards.parts)
        self._part_of = {p: (part, owned[p], known[p]) for p, part in zip(owned, parts, strict=True)}
        # The local optimizer has this rank's parts only. A scheduler changes param_groups, which it follows.
        local = [
            {**_settings(group), "params": [known[parameter] for parameter in trained]}
            for group, trained in zip(self.param_groups, groups, strict=True)
        ]
        self.optim = optimizer_class(local, **defaults)
        self._reduced = False  # gradients have been averaged, and step() need not do it
        self._reducer = None
        if stage == 2:
            shards = [bucket.gradients for bucket in self._buckets]
            self._reducer = Reducer(shards, self.comm, self._share, self.progress, names)
        whole = [bucket for bucket in self._buckets if stage == 1]
        self._views = {p: view for b in whole for p, view in zip(b.parameters, b.gradients.views, strict=True)}
        for parameter in names:
            if hasattr(parameter, "_zero_hook"):  # of an earlier optimizer of the same parameter
                parameter._zero_hook.remove()
            keep = self._keep if stage == 1 else self._reducer.gradient_has_come
            parameter._zero_hook = parameter.register_post_accumulate_grad_hook(keep)

    def add_param_group(self, param_group) -> None:
        if self._buckets is not None:
            raise DtlibError("A group cannot be added to flat memory: make a new ZeroOptimizer with all groups.")
        super().add_param_group(param_group)

    # Gradients

    def _keep(self, parameter) -> None:
        """A hook of stage 1: a gradient moves into flat memory, where those of later passes are added to it."""
        view = self._views[parameter]
        if parameter.grad is not view:
            check_dense(parameter.grad)
            view.copy_(parameter.grad)
            parameter.grad = view

    def _share(self) -> float | None:
        return share_by_samples(self.comm, self.batch_size)

    def reduce_gradients(self, scale: float = 1.0) -> None:
        """Average gradients over ranks and divide them by ``scale``, if that has not been done since the last step.

        ``step()`` does it by itself; it is here for who wants to look at ``masters`` in between.
        """
        if self._reduced:
            return
        if self.stage == 1:
            weight = self._share()
            for bucket in self._buckets:
                bucket.reduce(self.comm, weight)
            used = exchange_used(self.comm, [bucket.used for bucket in self._buckets])
        else:
            self._reducer.check()
            if not self._reducer.passes:
                self._reducer.run_empty()
            used = self._reducer.used_anywhere()
        for bucket in self._buckets:
            for piece, view in zip(bucket.owned, bucket.averages(), strict=True):
                piece.grad = view if next(used) else None
        self.masters.take_gradients(scale)
        self._reduced = True

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Between ``backward()`` and ``step()``: scale all gradients down together so that their joint 2-norm, over the
        parts of all ranks, is at most ``max_norm``; returns the norm before.

        Raises:
            DtlibError: for parameters that tensor parallelism has cut, as their other parts are not here.
        """
        refuse_parts((p for group in self.param_groups for p in group["params"]), f"clip_grad_norm_({max_norm})")
        self.reduce_gradients()
        return clip_by_norm([master.grad for master in self.masters.masters], max_norm, self.comm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for tensor in [*self.masters.parameters, *self.masters.masters]:
            tensor.grad = None
        if self._reducer:
            self._reducer.check()
            self._reducer.forget()
        self._reduced = False

    # The step

    def step(self, closure=None):
        """Average the gradients, update this rank's part, and give every rank all the new values.

        ``closure`` computes the loss anew and calls ``backward()``; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for mine, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            local.update(_settings(mine))  # a scheduler may have changed them
        self.optim.step()
        self.give_values()
        self._forget_gradients()
        return loss

    def give_values(self) -> None:
        """Give every rank's model the values of all parts, after parts have been changed from outside."""
        self.masters.give_values()
        for bucket in self._buckets:
            whole = bucket.values.flat
            self.comm.all_gather(whole, bucket.shards.own(whole))

    # What others may want to know

    def part_of(self, parameter):
        """The part of a parameter that this rank updates: a ``flat.Part``, its value, and what the local optimizer
        ``optim`` knows it as (its float32 master, if the parameter has 16 bits). None for one that is not trained."""
        return self._part_of.get(parameter)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Memory that this optimizer keeps beside parameters and states, by what it is for (accounting.py)."""
        gradients = [b.gradients.flat if self.stage == 1 else b.gradients.average for b in self._buckets]
        return {
            "parameters": [bucket.values.flat for bucket in self._buckets],
            "gradients": gradients,
            "communication": self._reducer.staging() if self._reducer else [],
        }

    def state_dict(self) -> dict:
        """This rank's part; ``load_state_dict`` takes it on the same rank of as many ranks. dtlib.checkpoint knows how
        to move between numbers of ranks."""
        masters = [master.detach() for master in self.masters.masters]
        return {
            "rank": self.comm.rank,
            "size": self.comm.size,
            "optimizer": self.optim.state_dict(),
            "masters": masters,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        place = state_dict.get("rank"), state_dict.get("size")
        if place != (self.comm.rank, self.comm.size):
            raise DtlibError(
                f"This state is that of rank {place[0]} of {place[1]}, and this is rank {self.comm.rank} of "
                f"{self.comm.size}: use dtlib.checkpoint, which moves between numbers of ranks."
            )
        self.optim.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for master, saved in zip(self.masters.masters, state_dict["masters"], strict=True):
                master.copy_(saved)
        for mine, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update(_settings(local))
        self.give_values()


class Bucket:
    """Parameters that lie in one flat memory, of which each rank owns an equal part."""

    def __init__(self, parameters: list[nn.Parameter], comm, stage: int):
        self.parameters = parameters
        self.shards = Shards([parameter.shape for parameter in parameters], comm.rank, comm.size)
        self.values = self._flat_buffer()
        with torch.no_grad():
            for parameter, view in zip(parameters, self.values.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        comm.broadcast(self.values.flat)
        self.owned = [nn.Parameter(view) for view in self.shards.views(self.shards.own(self.values.flat))]
        self.gradients = self._flat_buffer() if stage == 1 else GradientShard(parameters, self.shards)
        self.used = torch.zeros(len(parameters), dtype=torch.int8)  # stage 1: which have a gradient

    def _flat_buffer(self) -> FlatBuffer:
        first = self.parameters[0]
        return FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)

    def reduce(self, comm, weight: float | None) -> None:
        """Stage 1: average the gradients over ranks; this rank gets its part of them, in place."""
        for i, (parameter, view) in enumerate(zip(self.parameters, self.gradients.views, strict=True)):
            self.used[i] = parameter.grad is not None
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # given by hand
                view.copy_(parameter.grad)
            parameter.grad = None
        whole = self.gradients.flat
        if weight is not None:
            whole.mul_(weight)
        comm.reduce_scatter(self.shards.own(whole), whole, "mean" if weight is None else "sum")

    def averages(self) -> list[torch.Tensor]:
        """This rank's part of each gradient's average, once it has been reduced."""
        own = self.shards.own(self.gradients.flat) if isinstance(self.gradients, FlatBuffer) else self.gradients.average
        return self.shards.views(own)


def _settings(group: dict) -> dict:
    """Learning rate and the like of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _names_of(groups) -> dict:
    """What to call each trained parameter in an error: its name, where the optimizer was given names."""
    names = {}
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
        names.update((p, name) for p, name in zip(group["params"], given, strict=True) if p.requires_grad)
    return names
