"""Data parallelism: every rank has the whole model and a slice of the batch, and gradients are averaged.

plain.py has a diagram. ``DataParallel`` adds the features of torch's ``DistributedDataParallel``. Gradients are sent in
buckets, starting with the last layer, while the backward pass still computes the first layers (S. Li et al., "PyTorch
distributed: experiences on accelerating data parallel training", VLDB 13(12), 2020).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FIRST_BUCKET, LEAST_BUCKET, bucket_bytes, buckets_of
from dtlib.gradients.reducer import AllReduce, Bucket, Reducer, RootBuffers, progress_for, refuse_averaged
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import info_of
from dtlib.parallel.data.hooks import CommHook
from dtlib.world import init


class DataParallel(nn.Module):
    """Data parallelism in buckets that are all-reduced during the backward pass, and have arrived when it returns.

    Args:
        module: the model. Every rank has the same parameters in the same order. Rank 0's values are broadcast at
            construction.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``. Default: the communicator of
            ``dtlib.init()``.
        bucket_cap_mb: maximum size of a bucket in MiB; the first bucket is at most 1 MiB. Default: the size of the
            largest parameter, but at least 4 and at most 25.
        progress: how pending messages progress. With ``"inline"``, backward hooks poll: best if computing keeps all
            cores busy. With ``"thread"``, a thread polls: best if cores are idle. Default: ``"thread"`` on a GPU or an
            emulated network, otherwise ``"inline"``.
        algorithm: the ``all_reduce`` algorithm. Default: chosen by message size.

    Rank 0's buffers are broadcast before the first forward pass of each training step.

    If batch sizes differ between ranks, compute the loss with ``mean_over_tokens`` (gradients/tokens.py): a mean over
    samples, not over ranks. A parameter that no rank has used keeps
    ``grad=None``. If only some ranks have used it, the other ranks contribute zeros. ``torch.autograd.grad`` returns
    this rank's local gradient. Expert parameters that differ between these ranks are not averaged: ``MixtureOfExperts``
    handles them.

    Counterpart: ``torch.nn.parallel.DistributedDataParallel`` with ``gradient_as_bucket_view=True`` and
    ``find_unused_parameters=True``.

    Raises:
        DtlibError: if parameters differ between ranks or have a type that cannot be averaged. The message names the
            parameter.
    """

    def __init__(self, module: nn.Module, comm: AnyCommunicator | None = None, bucket_cap_mb: float | None = None,
                 progress: str | None = None, algorithm: str | None = None):  # fmt: skip
        super().__init__()
        self.module = module
        self.comm = as_communicator(init().comm if comm is None else comm)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and not self._is_an_experts(p)}
        _check_parameters(named, module, self.comm, bucket_cap_mb)
        names = {parameter: name for name, parameter in named.items()}
        self.progress = progress_for(self.comm, names, progress, "DataParallel")
        for hook in _hooks.pop(module, ()):  # hooks of an earlier wrapper of this module
            hook.remove()
        for tensor in [*module.parameters(), *module.buffers()]:
            if not self._is_an_experts(tensor):
                self.comm.broadcast(tensor)
        # Gradients become ready roughly in the reverse order of the forward pass.
        parameters = list(named.values())[::-1]
        cap = bucket_bytes(parameters, bucket_cap_mb, LEAST_BUCKET)
        groups = buckets_of(parameters, cap, min(cap, FIRST_BUCKET))
        self.buckets = [Bucket([parameters[i] for i in group]) for group in groups]
        self._root_buffers = RootBuffers(module, self.comm)
        self._collective = AllReduce(self.comm, algorithm)
        self.forwards = 0  # forward passes in training whose gradients are averaged
        same = [parameter for parameter in module.parameters() if not self._is_an_experts(parameter)]
        self._reducer = Reducer(
            self.buckets, self._collective, self, self.progress, names, root_buffers=self._root_buffers, values=same
        )
        self._trained = {parameter: (parameter.dtype, parameter.device) for parameter in parameters}
        self._join: list[int] | None = None  # in join(): for each rank, whether it still has batches
        _hooks[module] = [p.register_post_accumulate_grad_hook(self._reducer.gradient_is_ready) for p in parameters]

    def forward(self, *args: object, **kwargs: object) -> object:
        self._reducer.check()
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._trained and not self._is_an_experts(parameter):
                raise DtlibError(
                    "A parameter was unfrozen or replaced after the model was wrapped: wrap the model again with "
                    "DataParallel, and create the optimizer again."
                )
            if parameter in self._trained and self._trained[parameter] != (parameter.dtype, parameter.device):
                raise DtlibError(
                    "The model was converted or moved after it was wrapped: first convert or move it, then wrap it "
                    "with DataParallel, and create the optimizer."
                )
        if self.training and torch.is_grad_enabled() and self._reducer.synchronising:
            self.forwards += 1
            if self._join is not None:
                self._join = self._announce(True)
            self._root_buffers.broadcast(0 if self._join is None else _last_with_a_batch(self._join))
        return self.module(*args, **kwargs)

    def _is_an_experts(self, parameter) -> bool:
        """Return whether this parameter is of an expert that other ranks lack; MixtureOfExperts averages it."""
        return len(set(self.comm.members).intersection(info_of(parameter).experts)) > 1

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise DtlibError(
            "DataParallel cannot be copied, because all ranks would have to do it together: copy model.module instead."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this context; the first backward pass after it averages the sums."""
        before, self._reducer.synchronising = self._reducer.synchronising, False
        try:
            yield
        finally:
            self._reducer.synchronising = before

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Average buckets with ``hook(state, bucket)`` instead of ``all_reduce`` (hooks.py). All ranks call this.

        A hook cannot be combined with ``join()``. Counterpart: torch's ``register_comm_hook``.
        """
        self._collective = self._reducer.collective = CommHook(state, hook, self._collective, self.buckets)

    def tensors_by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers of this wrapper by purpose (measure/buffers.py)."""
        return {"communication": [flags for bucket in self.buckets for flags in flag_storage(bucket.parameters)]}

    # Ranks without batches

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow different numbers of batches per rank: a rank without a batch contributes zero gradients.

        Gradients are averaged over all ranks. In this context, each forward
        pass in training must be followed by a backward pass. At the end, all ranks receive the parameters of a rank
        that had the most batches. Counterpart: ``DistributedDataParallel.join``.
        """
        if isinstance(self._collective, CommHook):
            raise DtlibError("join() does not support a communication hook: use only one of them.")
        for name, module in self.module.named_modules():
            if getattr(module, "communicates_in_forward", False):
                what = name or "this model"
                raise DtlibError(f"join(): ranks without a batch cannot run {what}, which communicates.")
        self._join = [1] * self.comm.size
        try:
            yield
            last = self._join or []
            # This rank has no batch left. Take part in the steps of the other ranks until no rank has a batch.
            while any(still := self._announce(False)):
                self._join = last = still
                self._shadow()
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                self.comm.broadcast(tensor, _last_with_a_batch(last))
        finally:
            self._join = None

    def _announce(self, has_batch: bool) -> list[int]:
        """Gather one flag per rank: whether it has a batch."""
        flags = torch.zeros(self.comm.size, dtype=torch.int64)
        return self.comm.all_gather(flags, torch.tensor([int(has_batch)])).tolist()

    def _shadow(self) -> None:
        """Run all collectives of one training step with zero gradients."""
        assert self._join is not None
        self._root_buffers.broadcast(_last_with_a_batch(self._join))
        for parameter in self._trained:
            parameter.grad = None
        self._reducer.check()
        self.forwards += 1
        self._reducer.end()
        for parameter in self._trained:
            parameter.grad = None


def flag_storage(parameters: list) -> list[torch.Tensor]:
    """Return the part of the bucket's storage that follows the gradients; it holds the flags."""
    size = sum(parameter.numel() for parameter in parameters)
    views = [parameter.grad for parameter in parameters if parameter.grad is not None]
    elements = views[0].untyped_storage().nbytes() // views[0].element_size() if views else 0
    return [views[0].as_strided((elements - size,), (1,), size)] if elements > size else []


_hooks: WeakKeyDictionary = WeakKeyDictionary()  # for each wrapped module, the hooks of its parameters


def _last_with_a_batch(flags: list[int]) -> int:
    """Return the highest rank that has a batch, whose buffers all ranks receive, as in torch."""
    return max(rank for rank, has_batch in enumerate(flags) if has_batch)


def _check_parameters(named: dict, model, comm, bucket_cap_mb) -> None:
    if bucket_cap_mb is not None and bucket_cap_mb <= 0:
        raise DtlibError(f"DataParallel(bucket_cap_mb={bucket_cap_mb}): pass a size above 0, such as 25.")
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | nn.parallel.DistributedDataParallel):
            raise DtlibError(
                f"{name or 'This model'} is already in a {type(module).__name__}, so its gradients would be averaged "
                "twice, over different ranks: wrap the model once, over all axes, with mesh['data', 'expert']."
            )
    check_same_model(named, comm, "DataParallel", model)
    refuse_averaged(named, lambda owner: getattr(owner, "module", None) is model)
