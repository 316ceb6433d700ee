"""A module with sharded sequences: its attention runs as a ring, or with exchanges of heads."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.same_model import PASSES, check_same_arguments, check_same_values, digest_of
from dtlib.gradients.shard_info import note
from dtlib.parallel.context.attention import Sequence, ring_attention, ulysses_attention
from dtlib.parallel.context.order import ORDERS, positions_of

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}
# These layers mix tokens but do not communicate, so their results would be wrong.
MIX_TOKENS = (
    nn.RNNBase, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd, nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer, nn.MultiheadAttention, torch.jit.ScriptModule,
)  # fmt: skip
_hooks: WeakKeyDictionary = WeakKeyDictionary()  # for each wrapped module, the hooks of its parts


class ContextParallel(nn.Module):
    """``model(x)`` for this rank's tokens; torch's attention inside of ``module`` covers the tokens of all ranks.

        model = ContextParallel(module, mesh["context"])
        trained = DataParallel(model, mesh["data", "context"])           # or world.comm, if there are no other axes
        x, target = model.split(x), model.split(target)                 # whole sequences: (batch, tokens, ...)
        losses = cross_entropy(trained(x).flatten(0, 1), target.flatten(), reduction="none")
        mean_over_tokens(losses, mesh["data", "context"]).backward()

    Args:
        module: works token by token, except for ``torch.nn.functional.scaled_dot_product_attention``, under any name.
            Its inputs are (batch, heads, tokens, width), causal or not. The query heads are a multiple of the key
            heads.
        comm: the ranks that share each sequence; all of them have the same parameters.
        order: ``zigzag`` or ``contiguous`` (order.py).
        method: ``ring`` or ``ulysses``.

    Positions for rotary or learned embeddings depend on the order: use ``model.positions(length)``. Gradients cover
    only this rank's tokens. Average them over a communicator of all data and context ranks, with any strategy; other
    communicators are refused. Counterparts: torch's ``context_parallel`` and Megatron-LM's context parallelism;
    DeepSpeed says sequence parallelism.

    While ``model(x)`` runs, a ``TorchFunctionMode`` replaces torch's attention in this thread. Activation checkpointing
    calls parts of the module again in the backward pass, so hooks of the parts replace attention there, too. Therefore
    only modules can be checkpointed, as in ``checkpoint(block, x, use_reentrant=False)``.

    Limits without an error:

    - a mean over this rank's tokens, if ranks have different numbers of tokens: use ``mean_over_tokens``
    - functions that mix tokens, such as a mean, a shift, ``cumsum``, ``functional.conv1d`` or ``group_norm``
    - another attention beside torch's, including ``torch.ops.aten`` or a checkpointing ``autograd.Function``
    - slices that were cut by hand in another order
    - positions inside the module that were not made by ``torch.arange``

    Forward passes are not compiled by ``torch.compile``.

    Raises:
        DtlibError: at construction, for modules that mix tokens in another way, or arguments that differ between ranks.
            In the forward pass, for masks, dropout, queries and keys of different lengths, a module that calls no
            attention, and ``checkpoint(use_reentrant=True)`` of a function that calls attention.
    """

    communicates_in_forward = True  # read by code that lets ranks stop early, such as DataParallel.join

    def __init__(self, module: nn.Module, comm: AnyCommunicator, order: str = "zigzag", method: str = "ring"):
        super().__init__()
        self.module, self.comm = module, as_communicator(comm)
        self.order, self.method = order, method
        check_same_arguments(self.comm, "ContextParallel", order=order, method=method)
        if order not in ORDERS or method not in METHODS:
            raise DtlibError(
                f"ContextParallel(order={order!r}, method={method!r}): choose an order from {', '.join(ORDERS)}, and "
                f"a method from {', '.join(METHODS)}."
            )
        for name, part in module.named_modules():
            if isinstance(part, MIX_TOKENS):
                raise DtlibError(
                    f"ContextParallel: {name or 'the module'} is {type(part).__name__}, which would use only this "
                    "rank's tokens: use layers that compute each token separately, and scaled_dot_product_attention."
                )
        for parameter in module.parameters():
            note(parameter, sequences=self.comm.members)
        self._length: tuple[torch.Size, int] | None = None
        self._calls = self._passes = 0
        self._lengths_vary = False  # within one forward pass
        self._mode = _AttentionReplaced(self._attention)
        # For each running call of a part, innermost last: whether gradients were enabled when it began.
        self._running: list[bool] = []
        for handle in _hooks.get(module, ()):  # hooks of an earlier wrapper of this module
            handle.remove()
        # Torch's own modules do not call attention. The hooks are functions, because a copy of the module must not copy
        # this object.
        parts = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
        begins, ends = lambda part, _: self._part_begins(part), lambda *_: self._part_ends()
        _hooks[module] = [part.register_forward_pre_hook(begins, prepend=True) for part in parts]
        _hooks[module] += [part.register_forward_hook(ends, always_call=True) for part in parts]

    def positions(self, length: int) -> torch.Tensor:
        """Return the positions of this rank's tokens in sequences of ``length``; int64, on the parameters' device."""
        here = positions_of(self.comm.rank, self.comm.size, length, self.order)
        return here.to(next((parameter.device for parameter in self.module.parameters()), here.device))

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's tokens of whole sequences (inputs, targets, masks, positions), equal on all ranks."""
        return x.index_select(dim, self.positions(x.shape[dim]).to(x.device))

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return whole sequences in their original order on every rank, from each rank's tokens; without gradients."""
        whole = torch.cat(self.comm.all_gather_object(x.detach().movedim(dim, 0).cpu().clone()))
        places = [positions_of(rank, self.comm.size, len(whole), self.order) for rank in range(self.comm.size)]
        return whole[torch.cat(places).argsort()].movedim(0, dim).to(x.device)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.training and torch.is_grad_enabled():
            check_same_values(self, list(self.module.parameters()), self.comm, "parameters")
        # An interrupted backward pass leaves calls in the list. Autograd itself has left the mode.
        self._length, self._calls, self._running = None, 0, []
        self._passes += 1
        self._mode.ranges.clear()
        self._begin()
        try:
            # A compiled module would bypass the TorchFunctionMode.
            with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
                out = self.module(*args, **kwargs)
        finally:
            while self._running:
                self._end()
        if not self._calls:
            raise DtlibError(
                "ContextParallel: the module never called torch's scaled_dot_product_attention. Another attention "
                "would use only this rank's tokens: call torch's function."
            )
        return out

    def _begin(self) -> None:
        if not self._running:
            self._mode.__enter__()
        self._running.append(torch.is_grad_enabled())

    def _end(self) -> None:
        self._running.pop()
        if not self._running:
            self._mode.__exit__(None, None, None)

    def _part_begins(self, part) -> None:
        alone = part is self.module and not self._running and not _in_backward()
        if alone and part.training and torch.is_grad_enabled():
            raise DtlibError(
                "The module inside of a ContextParallel was called directly, so its attention would see only this "
                "rank's tokens: call the ContextParallel instead."
            )
        if self._running or _in_backward():  # activation checkpointing recomputes this part
            self._begin()

    def _part_ends(self) -> None:
        if self._running:
            self._end()

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # fmt: skip
        outside = (
            "a mask" if attn_mask is not None else f"dropout_p={dropout_p}" if dropout_p
            else f"queries of {tuple(query.shape)} and keys of {tuple(key.shape)}"
            if query.dim() != 4 or query.shape[-2] != key.shape[-2] or value.shape != key.shape
            or query.shape[0] != key.shape[0]
            or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]
            or (query.shape[1] != key.shape[1] and not enable_gqa) else None
        )  # fmt: skip
        if outside:
            raise DtlibError(
                f"ContextParallel: attention with {outside} is not supported: it needs (batch, heads, tokens, width) "
                "of one length, and only is_causal, scale and enable_gqa."
            )
        if self._running[-1] and not torch.is_grad_enabled():
            raise DtlibError(
                "ContextParallel: attention runs without gradients in a module that was called with gradients, as in "
                "checkpoint(function, use_reentrant=True): pass use_reentrant=False, and a module as the function."
            )
        self._calls += 1
        length = self._whole_length(query, is_causal, scale)
        sequence = Sequence(self.comm, length, self.order, is_causal)
        return METHODS[self.method](query, key, value, sequence, scale)

    def _whole_length(self, query, *settings) -> int:
        """Return the number of tokens of all ranks.

        Ranks exchange it once per forward pass, because most modules have one length. In the first passes, ranks
        exchange it for each attention, and check that they agree.
        """
        shape, before = query.shape, self._length
        if before and shape[2] != before[0][2] and not self._lengths_vary and self._passes > PASSES:
            raise DtlibError(
                f"ContextParallel: attention over {before[0][2]} and over {shape[2]} tokens in one forward pass, but "
                f"with one length in the first {PASSES} passes: use another ContextParallel for the other length."
            )
        if not before or before[0] != shape or self._lengths_vary or self._passes <= PASSES:
            # In the first passes, also compare the values of queries, to notice ranks that were given whole sequences.
            mine = digest_of([query]) if self._passes <= PASSES and shape[2] > 1 else None
            mine = mine if mine and bool((query != query[:, :, :1]).any()) else None
            ours = tuple(shape), str(query.dtype), settings, mine, set(self._mode.ranges)
            asked = self.comm.all_gather_object(ours)
            shapes = [(shape, dtype) for shape, dtype, *_ in asked]
            if len({(shape[:2], shape[3:], dtype) for shape, dtype in shapes}) > 1:
                raise DtlibError(f"ContextParallel: ranks have queries of {shapes}: pass the same batch on all ranks.")
            if len(different := {one[2] for one in asked}) > 1:
                raise DtlibError(f"ContextParallel: ranks pass (is_causal, scale) {different}: pass the same on all.")
            lengths = [shape[2] for shape, _ in shapes]
            if self.comm.size > 1 and mine and len({one[3] for one in asked}) == 1:
                raise DtlibError(
                    f"ContextParallel: all ranks have the same queries, of {lengths[0]} tokens, so each rank may have "
                    "whole sequences: pass each rank its own tokens, with x = model.split(x)."
                )
            # Rotary frequencies also call torch.arange, with the head width or half of it.
            widths = {shape[-1], shape[-1] // 2} if len(set(lengths)) == 1 else set()
            made = [n > 1 and n in one[4] - widths for n, one in zip(lengths, asked, strict=True)]
            if self.comm.size > 1 and all(made):
                raise DtlibError(
                    f"ContextParallel: the module called torch.arange for {lengths} tokens, so positions would start "
                    "at 0 on each rank: pass model.positions(length) to the module."
                )
            # split() fixes how many tokens each rank has; other lengths mean that sequences were not divided by it.
            cut = [len(positions_of(rank, self.comm.size, sum(lengths), self.order)) for rank in range(self.comm.size)]
            if lengths != cut:
                raise DtlibError(
                    f"ContextParallel: ranks have {lengths} tokens, but in order {self.order} they should have {cut}: "
                    "cut sequences with split()."
                )
            self._lengths_vary |= before is not None and before[1] != sum(lengths)
            self._length = shape, sum(lengths)
        assert self._length
        return self._length[1]


class _AttentionReplaced(TorchFunctionMode):
    """A mode that replaces calls of torch's attention, under any name, by calls of ``attention``."""

    def __init__(self, attention: Callable):
        super().__init__()
        self._attention = attention
        self.ranges: list[int] = []  # lengths n of torch.arange(n) in this forward pass

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            raise DtlibError(
                "ContextParallel: multi_head_attention_forward has its own attention, which would use only this rank's "
                "tokens: call torch.nn.functional.scaled_dot_product_attention."
            )
        if func is torch.arange and (len(args) == 1 or (len(args) == 2 and args[0] == 0)):
            self.ranges.append(int(args[-1]))
        return func(*args, **kwargs)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
