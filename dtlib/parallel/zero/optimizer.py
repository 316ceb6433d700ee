"""ZeRO stages 1 and 2: every rank keeps the whole model, and updates an equal shard of it.

In data parallelism, all N ranks keep the same optimizer states and do the same update. Here each rank owns 1/N of the
flat parameters. Two collectives replace the all-reduce and together send as many bytes:

    gradients     reduce_scatter    rank r receives the average of its shard
                  optimizer.step()  on this shard, with states for this shard
    parameters    all_gather        every rank receives all new values

Stage 1 keeps all gradients until ``step()`` and reduces them there. Stage 2 reduces gradients in buckets during the
backward pass and frees them, so each rank keeps only the averages of its own shard. Stage 2 therefore sends gradients
in every backward pass, and stage 1 once per step.

                        bytes per parameter: value + gradient + Adam in float32
    data parallelism    4 + 4 + 8
    stage 1             4 + 4 + 8/N
    stage 2             4 + (4 + 8)/N

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn, optim

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import bucket_bytes, buckets_of
from dtlib.gradients.local_gradient import drop_placeholder, is_freed
from dtlib.gradients.precision import MasterWeights, clip_by_norm, refuse_shards
from dtlib.gradients.reducer import Reducer, ReduceScatter, progress_for, refuse_averaged
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import replace_hook
from dtlib.parallel.zero.argument_checks import check_arguments
from dtlib.parallel.zero.sharded_bucket import ShardedBucket, WholeGradients, names_of
from dtlib.world import init


class ZeroOptimizer(optim.Optimizer):
    """An optimizer that shards its states (stage 2: also the gradients) over the ranks of ``comm``.

    ``loss.backward()`` does not change, and the model needs no wrapper. ``step()`` averages gradients over ranks,
    updates this rank's shard, and all-gathers the new values.

    Args:
        params: parameters or parameter groups, as for any optimizer, or ``model.named_parameters()``, so that errors
            can name parameters. Rank 0's values are broadcast at construction. Parameters that do not require gradients
            are not changed.
        optimizer_class: an element-wise torch optimizer, such as ``torch.optim.AdamW``, or a subclass that inherits its
            ``step``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``. Default: the communicator of
            ``dtlib.init()``.
        stage: 1 shards the optimizer states; 2 also shards the gradients.
        bucket_cap_mb: size of the gradient buckets of stage 2 in MiB. Default: the size of the largest parameter, at
            most 25. Only one bucket is in flight at a time.
        offload: keep master weights and optimizer states in host memory and step there (ZeRO-Offload, J. Ren et al.,
            USENIX ATC 2021). Without a GPU, this has no effect and warns.
        progress: what polls the messages of stage 2 during the backward pass: ``"inline"`` (the hooks) or ``"thread"``.
            Default: as in DataParallel.
        **defaults: passed to ``optimizer_class``.

    Parameters in 16 bits get float32 master weights, only for this rank's shard.

    If batch sizes differ between ranks, compute the loss with ``mean_over_tokens`` (gradients/tokens.py). A parameter
    that no rank has used is not updated. After ``step()``, all gradients are None.

    At stage 2, gradients are sent and freed during ``backward()``. Placeholders replace them and refuse to be read. Use
    ``optimizer.zero_grad()`` to drop the averages; ``model.zero_grad()`` cannot drop them. Clip with
    ``optimizer.clip_grad_norm_``. torch's ``clip_grad_norm_`` is refused, because no rank has all averages before
    ``step()``.

    Counterparts: ``torch.distributed.optim.ZeroRedundancyOptimizer``, which is stage 1 and also needs
    ``DistributedDataParallel``; DeepSpeed's ZeRO stages 1 and 2.

    Raises:
        DtlibError: for an optimizer that is not element-wise, an unknown stage, parameters that differ between ranks,
            or a parameter type that cannot be averaged; in ``step()``, for parameters that were unfrozen or converted
            after construction.
    """

    optim: torch.optim.Optimizer  # the local optimizer, which has only this rank's shards

    def __init__(self, params: Iterable, optimizer_class: type, comm: AnyCommunicator | None = None, stage: int = 1,
                 bucket_cap_mb: float | None = None, offload: bool = False, progress: str | None = None,
                 **defaults: object):  # fmt: skip
        check_arguments(optimizer_class, stage, bucket_cap_mb)
        self.comm = as_communicator(init().comm if comm is None else comm)
        self.stage, self.forwards = stage, 0
        self._names: dict[nn.Parameter, str] = {}
        self._reduced = 0  # backward passes in the averages that step() will use; 0 if there are none yet
        # The base class needs default settings, so take those of an optimizer with a dummy parameter.
        super().__init__(params, optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults)
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        self.progress = progress_for(self.comm, everything, progress, "ZeroOptimizer")
        for i, group in enumerate(self.param_groups):
            self._check_group(i, group)
        # Nothing was changed before this line, so a model that was refused can be used again.
        self._buckets = [bucket for group in self.param_groups for bucket in self._shard_group(group, bucket_cap_mb)]
        owned = {p: piece for bucket in self._buckets for p, piece in zip(bucket.parameters, bucket.owned, strict=True)}
        if offload and not any(parameter.is_cuda for parameter in owned):
            warnings.warn("offload: there is no GPU here, so states are in host memory anyway.", stacklevel=2)
        self.masters = MasterWeights(owned.values(), "cpu" if offload else None, wholes=owned)
        slices = [slice_ for bucket in self._buckets for slice_ in bucket.shards.slices]
        self._shard_of = dict(zip(owned, zip(slices, owned.values(), self.masters.masters, strict=True), strict=True))
        # Schedulers change ``param_groups`` of this optimizer; ``step()`` copies the settings to the local optimizer.
        self.optim = optimizer_class([
            {**_settings_of(group), "params": [self._shard_of[p][2] for p in group["params"] if p.requires_grad]}
            for group in self.param_groups
        ], **defaults)  # fmt: skip
        self._connect()

    def add_param_group(self, param_group: dict) -> None:
        """Add a group at construction; the constructor of torch's optimizers calls this."""
        if hasattr(self, "optim"):
            raise DtlibError("ZeroOptimizer flattens its groups at construction: create a new one with all groups.")
        super().add_param_group(param_group)

    def _check_group(self, number: int, group: dict) -> None:
        """Refuse a group that differs between ranks, or whose gradients a DataParallel averages."""
        self._names |= (names := names_of(number, group))
        named = {name: parameter for parameter, name in names.items() if parameter.requires_grad}
        check_same_model(named, self.comm, "ZeroOptimizer")
        if self.stage == 2:
            refuse_averaged(named, lambda owner: isinstance(owner, ZeroOptimizer))

    def _shard_group(self, group: dict, cap_mb: float | None) -> list[ShardedBucket]:
        """Flatten and shard one group; return its buckets."""
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        for parameter in group["params"]:
            if not parameter.requires_grad:
                self.comm.broadcast(parameter)
        # Gradients become ready roughly in the reverse order of the forward pass. Stage 1 sends them all at the end, so
        # it does not need small buckets.
        order = trained[::-1]
        cap = bucket_bytes(order, cap_mb) if self.stage == 2 else 2**63
        # A large gradient gets its own bucket, so that it is sent without a copy.
        indices = buckets_of(order, cap, cap, alone_from=cap / 2 if self.stage == 2 else cap)
        kind = WholeGradients if self.stage == 1 else ShardedBucket
        return [kind([order[i] for i in some], self.comm) for some in indices]

    def _connect(self) -> None:
        """Register the autograd hooks that collect or send gradients."""
        self._reducer = Reducer(
            self._buckets, ReduceScatter(self.comm), self, self.progress, self._names, by_call=self.stage == 1,
            values=list(self._names),
        )  # fmt: skip
        for bucket in self._buckets:
            keep = bucket.keep if isinstance(bucket, WholeGradients) else self._reducer.gradient_is_ready
            for parameter in bucket.parameters:
                replace_hook(parameter, keep)

    # Gradients

    def reduce_gradients(self, scale: float = 1.0) -> None:
        """Average gradients over ranks and divide them by ``scale``, unless this was already done since the last step.

        ``step()`` calls this. Call it yourself to inspect or change the gradients of ``masters`` before the step.
        """
        if self._reduced:
            if self._reduced < self._reducer.passes or not all(
                is_freed(parameter.grad) for parameter in self._shard_of
            ):
                raise DtlibError(
                    "backward() was called after reduce_gradients() or clip_grad_norm_(), so step() would lose its "
                    "gradients: call zero_grad() now, and these two after the last backward() of a step."
                )
            return
        self._check_parameters()
        self._reducer.check()
        if not self._reducer.passes:
            self._reducer.end()
        for bucket in self._buckets:
            assert bucket.average is not None
            views = bucket.shards.views(bucket.average)
            for piece, view, ranks in zip(bucket.owned, views, bucket.used_anywhere, strict=True):
                piece.grad = view if ranks else None
        self.masters.take_gradients(scale)
        self._reduced = self._reducer.passes

    def _check_parameters(self) -> None:
        """Refuse changes to parameters that would otherwise give wrong results without an error."""
        for parameter, name in self._names.items():
            if parameter.requires_grad and parameter not in self._shard_of:
                raise DtlibError(
                    f"{name} was frozen when ZeroOptimizer was created, and is trained now: create a new one."
                )
            if self.stage == 2 and not is_freed(parameter.grad):
                raise DtlibError(
                    f"{name} has a gradient that did not come from a backward pass through this optimizer's hooks: "
                    "at stage 2, set no gradients by hand and leave DataParallel out, or use stage 1."
                )
        for bucket in self._buckets:
            bucket.check(self._names)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their joint 2-norm over the shards of all ranks is at most ``max_norm``.

        Call it between ``backward()`` and ``step()``. Returns the norm before scaling.

        Raises:
            DtlibError: for shards of tensor-parallel layers, because the other shards are on other ranks.
        """
        refuse_shards((p for group in self.param_groups for p in group["params"]), f"clip_grad_norm_({max_norm})")
        self.reduce_gradients()
        gradients = [master.grad for master in self.masters.masters]
        return clip_by_norm(gradients, max_norm, self.comm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for tensor in [*self.masters.parameters, *self.masters.masters]:
            tensor.grad = None
        for parameter in self._shard_of:
            drop_placeholder(parameter)
        self._reducer.check()
        self._reducer.forget()
        self._reduced = 0

    # The step

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one form
        """Average the gradients, update this rank's shard, and all-gather the new values.

        ``closure`` computes the loss again and calls ``backward()``; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        _copy_settings(self.param_groups, self.optim.param_groups)  # a scheduler may have changed them
        self.optim.step()
        self.copy_to_parameters()
        self.zero_grad()
        return loss

    def copy_to_parameters(self) -> None:
        """All-gather the values of all shards into the model, for example after shards were changed from outside."""
        self.masters.copy_to_parameters()
        for bucket in self._buckets:
            whole = bucket.values.flat
            self.comm.all_gather(whole, bucket.shards.own(whole))

    # State and inspection

    def shard_of(self, parameter: nn.Parameter) -> tuple | None:
        """Return this rank's shard of a parameter, or None if the parameter is not trained.

        The result is a ``flat.Slice``, the shard's value, and the parameter that the local optimizer ``optim`` uses:
        the float32 master of a 16-bit parameter, otherwise the value itself.
        """
        return self._shard_of.get(parameter)

    def tensors_by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers of this optimizer, other than its states, by purpose (measure/buffers.py)."""
        return {
            "parameters": [view for bucket in self._buckets for view in bucket.values.views],
            "gradients": [view for bucket in self._buckets for view in bucket.gradients()],
            "masters": self.masters.masters,
        }

    def state_dict(self) -> dict:
        """Return this rank's shard, for the same rank and the same number of ranks.

        dtlib.checkpoint saves the states of all ranks, for any number of ranks and any strategy.
        """
        _copy_settings(self.param_groups, self.optim.param_groups)  # a scheduler has changed them since the step
        return {
            "rank": self.comm.rank,
            "size": self.comm.size,
            "optimizer": self.optim.state_dict(),
            "masters": [master.detach() for master in self.masters.masters],
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Load this rank's shard."""
        if self._reduced or self._reducer.passes or any(not is_freed(parameter.grad) for parameter in self._shard_of):
            raise DtlibError("A state cannot be loaded while gradients are pending: call step() or zero_grad() first.")
        place = state_dict.get("rank"), state_dict.get("size")
        if place != (self.comm.rank, self.comm.size):
            raise DtlibError(
                f"This state belongs to rank {place[0]} of {place[1]}, but this is rank {self.comm.rank} of "
                f"{self.comm.size}: use dtlib.checkpoint, for other numbers of ranks and optimizers."
            )
        self.optim.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for master, saved in zip(self.masters.masters, state_dict["masters"], strict=True):
                master.copy_(saved)
        _copy_settings(self.optim.param_groups, self.param_groups)
        self.copy_to_parameters()


def _copy_settings(groups: list, to: list) -> None:
    for group, other in zip(groups, to, strict=True):
        other.update(_settings_of(group))


def _settings_of(group: dict) -> dict:
    """Return a group's settings, such as the learning rate, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
