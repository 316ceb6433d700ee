"""Units of ZeRO stage 3 and the hooks that gather and free their parameters; units of one model share a plan.

The life of a unit's parameters in one step: ``_before_forward`` gathers them and ``_after_forward`` frees them.
``_before_backward`` gathers them again. When all gradients are ready, the reducer calls ``Flat.complete``, which frees
them, and ``Flat.finish`` stores this rank's shard of the average.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dtlib.comm import Communicator
from dtlib.comm.waiting import Operation, progress_thread
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import ShardedGradient
from dtlib.gradients.reducer import GradientShard, Reducer, ReduceScatter, progress_for
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import copy_info, hooks_of_others, info_of, note
from dtlib.parallel.zero.sharded.parameter_locations import own_modules, places_of


class Unit:
    """The parameters of a module that are gathered and freed together."""

    def __init__(self, module: nn.Module, comm: Communicator, reshard_after_forward: bool, prefetch: bool | None,
                 progress: str | None):  # fmt: skip
        self.module, self.comm, self.reshard_after_forward = module, comm, reshard_after_forward
        all_places = places_of(module)
        _check({parameter: places[0][2] for parameter, places in all_places.items()}, comm)
        for owner in own_modules(module):
            for buffer in owner.buffers(recurse=False):
                comm.broadcast(buffer)
        self.progress = progress_for(comm, all_places, progress, "fully_shard")
        self.prefetch = self.progress == "thread" if prefetch is None else prefetch
        # One flat tensor has one dtype and device, and is either trained or frozen.
        kinds: dict[tuple, dict[nn.Parameter, list]] = {}
        for parameter, places in all_places.items():
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            kinds.setdefault(kind, {})[parameter] = places
        self.flats = [Flat(same, comm) for same in kinds.values()]
        for leaf in (leaf for flat in self.flats if flat.trained for leaf in flat.leaves):
            leaf.register_post_accumulate_grad_hook(self._gradient_is_ready)
        self.plan: Plan | None = None
        self._gathering: list[Operation] = []  # all-gathers in flight
        self._uses = 0  # forward passes of this module that have not ended
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)
        # Submodules only have shards outside of the unit's forward pass, so refuse to call them directly.
        for part in own_modules(module):
            if part is not module and part._parameters:
                part.register_forward_pre_hook(self._refuse_alone, prepend=True)

    def start_gathering(self) -> None:
        """Launch the all-gathers of all parameters that are not whole."""
        for flat in self.flats:
            if flat.is_free() and not flat.sent:
                flat.make_room()
                self._gathering.append(self.comm.all_gather(flat.memory(), flat.shard, async_op=True))

    def gather(self) -> None:
        """Make all parameters whole and put them into the modules."""
        self.start_gathering()
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.show(flat.leaves)

    def free(self) -> None:
        """Free the whole parameters, so that modules have this rank's shards again."""
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.free()

    def _is_summoned(self) -> bool:
        return any(flat.summoned for flat in self.flats)

    # Hooks that autograd and modules call

    def _before_forward(self, module, inputs) -> None:
        if self._is_summoned():
            raise DtlibError("Do not call the model within summon_full_params(): leave that context.")
        self._uses += 1
        plan = plan_of(self)
        if not _in_backward():  # in a backward pass, activation checkpointing recomputes the unit
            plan.enter(self)
        self.gather()
        if self.prefetch and not _in_backward():
            plan.prefetch(self, +1)

    def _refuse_alone(self, part, inputs) -> None:
        if any(flat.is_free() and not flat.summoned for flat in self.flats):
            raise DtlibError(
                f"A {type(part).__name__} of a model of fully_shard was called directly, but has only this rank's "
                "shards of its parameters: call the whole model, or a module that you passed to fully_shard."
            )

    def _after_forward(self, module, inputs, output) -> None:
        if self._is_summoned():  # _before_forward has refused this call
            return
        self._uses -= 1
        differentiable = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
        if differentiable:
            torch.autograd.graph.register_multi_grad_hook(differentiable, self._before_backward, mode="any")
        if not _in_backward():
            if not self._uses and (self.reshard_after_forward or not differentiable):
                self.free()
            plan_of(self).leave(self, raised=output is None)

    def _before_backward(self, gradient) -> None:
        plan = plan_of(self)
        plan.backward_begins()
        self.gather()
        if self.prefetch:
            plan.prefetch(self, -1)

    def _gradient_is_ready(self, leaf) -> None:
        plan = plan_of(self)
        if plan.synchronising:
            assert plan.reducer is not None
            plan.reducer.gradient_is_ready(leaf)
        else:
            next(flat for flat in self.flats if flat.trained and leaf in flat.piece_of).mark(leaf)


class Flat(GradientShard):
    """The parameters of a unit with one dtype and device: at rest this rank's shard, during a pass the whole tensor.

    If the parameters are trained, this is also a gradient bucket. ``places`` lists, for each parameter, the modules
    that have it and the attribute names; there are several if the parameter is tied.

    Autograd sees the ``leaves``, which are views of the whole tensor. The optimizer sees the ``pieces``, which are
    views of the shard.
    """

    def __init__(self, places: dict[nn.Parameter, list], comm: Communicator):
        first = next(iter(places))
        self.comm, self.trained = comm, first.requires_grad
        self.places = list(places.values())
        shards = Shards([parameter.shape for parameter in places], comm.rank, comm.size)
        self.whole = FlatBuffer(shards.shapes, first.dtype, first.device, shards.padding)
        for parameter, view in zip(places, self.whole.views, strict=True):
            view.copy_(parameter.detach())
        self.shard = torch.zeros(shards.length, dtype=first.dtype, device=first.device)
        # A second tensor for the same memory, for the reason given in memory().
        comm.scatter(self.shard, torch.from_dlpack(self.whole.flat), 0)
        self.leaves = [nn.Parameter(view, self.trained) for view in self.whole.views]
        self.pieces = [nn.Parameter(view, self.trained) for view in shards.views(self.shard)]
        for parameter, leaf, piece, slice_ in zip(places, self.leaves, self.pieces, shards.slices, strict=True):
            copy_info(parameter, leaf, piece)  # for example, that it is a shard of a tensor-parallel layer
            note(parameter, sharded_as=places[parameter][0][2])
            note(piece, slice=slice_)
        super().__init__(self.leaves, shards)
        self.piece_of = dict(zip(self.leaves, self.pieces, strict=True)) if self.trained else {}
        self.summoned = False  # True within summon_full_params
        # True once the gradients are final: the rest of the backward pass does not need the parameters. Ranks that have
        # used them in different forward passes must not gather them a different number of times.
        self.sent = False
        self._bytes = self.whole.flat.untyped_storage().nbytes()
        self.free()

    def is_free(self) -> bool:
        """Return whether the whole tensor's memory is freed."""
        return self.whole.flat.untyped_storage().nbytes() == 0 and self._bytes > 0

    def memory(self) -> torch.Tensor:
        """Return the whole flat parameters as a second tensor with the same memory.

        The first tensor must not be used for communication: its storage could not be resized after an export to numpy,
        and autograd would count writes as changes of the parameters.
        """
        return torch.from_dlpack(self.whole.flat)

    def make_room(self) -> None:
        """Allocate memory for the whole tensor."""
        self.whole.flat.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Free the memory. The tensor objects stay, because autograd refers to them."""
        self.show(self.pieces)
        self.whole.flat.untyped_storage().resize_(0)

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        """Register these parameters in the modules under their names."""
        for parameter, places in zip(parameters, self.places, strict=True):
            for module, attribute, _ in places:
                module._parameters[attribute] = parameter

    def gather_full(self) -> torch.Tensor:
        """Gather whole parameters and put them into the modules.

        Returns the flat tensor, which ``scatter_full`` needs.
        """
        self.check()
        whole = FlatBuffer(self.shards.shapes, self.shard.dtype, self.shard.device, self.shards.padding)
        self.comm.all_gather(whole.flat, self.shard)
        self.summoned = True
        self.show([nn.Parameter(view, self.trained) for view in whole.views])
        return whole.flat

    def scatter_full(self, whole: torch.Tensor) -> None:
        """Scatter rank 0's values to the shards and put the shards back into the modules."""
        own = torch.empty_like(self.shard)
        self.comm.scatter(own, whole, 0)
        self.shard.copy_(own)  # with torch, so that master weights notice the change
        self.summoned = False
        self.show(self.pieces)

    def check(self) -> None:
        """Refuse changes that were made to the shards between passes and would be lost without an error."""
        for piece, own, places in zip(self.pieces, self.shards.views(self.shard), self.places, strict=True):
            changed = None
            if piece.requires_grad != self.trained:
                changed = "frozen" if self.trained else "unfrozen"
            elif piece.data_ptr() != own.data_ptr() or piece.dtype != own.dtype:
                changed = "converted or moved"
            elif any(module._parameters.get(attribute) is not piece for module, attribute, _ in places):
                changed = "replaced"
            elif piece._backward_hooks or hooks_of_others(piece):
                changed = "given a hook of its gradient, which autograd will not call,"
            if changed:
                raise DtlibError(
                    f"{places[0][2]} was {changed} after fully_shard: build a new model, and do it earlier."
                )

    @torch.no_grad()
    def mark(self, leaf: nn.Parameter) -> None:
        """Mark a shard as having an accumulated gradient, in no_sync(). ``zero_grad()`` will set the mark to None."""
        piece = self.piece_of[leaf]
        if piece.grad is None:
            piece.grad = torch.zeros_like(piece).as_subclass(ShardedGradient)

    def clear_stale_gradients(self) -> None:
        """Drop accumulated whole gradients if ``zero_grad()`` was called. Called before each forward pass."""
        for leaf, piece in self.piece_of.items():
            if piece.grad is None:
                leaf.grad = None

    def begin(self) -> None:
        """Begin a backward pass: add new averages to the gradients that the shards already have."""
        self.forget()
        if any(piece.grad is not None for piece in self.pieces):
            self.average = torch.zeros_like(self.shard)
            for piece, view in zip(self.pieces, self.shards.views(self.average), strict=True):
                if piece.grad is not None:
                    view.copy_(piece.grad)

    def complete(self) -> None:
        """Free the whole parameters of a complete bucket. Frozen parameters stay until the end of the pass."""
        super().complete()
        self.free()
        self.sent = True

    def finish(self, used: list) -> None:
        """Store the average as the gradients of the shards. A shard that no rank has used keeps its gradient."""
        super().finish(used)
        assert self.average is not None
        for piece, view, is_used in zip(self.pieces, self.shards.views(self.average), used, strict=True):
            if is_used:
                piece.grad = view.as_subclass(ShardedGradient)
        self.sent = False
        self.forget()


class Plan:
    """State shared by the units of one model: their order and the gradient reducer."""

    def __init__(self, root: Unit):
        self.root = root
        self.units = [unit for module in root.module.modules() if (unit := unit_of(module)) is not None]
        for unit in self.units:
            unit.plan = self
        self.synchronising = True
        self.reducer: Reducer | None = None
        self._order: list[Unit] = []  # units in the order of the last forward pass
        self._running: list[Unit] = []  # units of the current forward pass so far
        self._depth = 0
        self._in_backward = False
        self._background = ExitStack()  # the progress thread during a pass
        # Gradients use a separate communicator, because their order among the all-gathers may differ between ranks.
        self.comm = root.comm if getattr(root.comm, "simulated", False) else root.comm.split(0)

    def enter(self, unit: Unit) -> None:
        """Record that the forward pass enters a unit."""
        self._depth += 1
        if self._depth == 1:
            self._begin_forward()
        if unit not in self._running:
            self._running.append(unit)

    def _begin_forward(self) -> None:
        self._background.close()
        if self.reducer:
            self.reducer.check()
        if self._in_backward:  # the last backward pass raised an error
            self._backward_ends()
        for flat in (flat for unit in self.units for flat in unit.flats):
            if not flat.is_free():  # after a forward pass without a backward pass; values may have changed since
                flat.free()
            flat.sent = False
            flat.check()
            flat.clear_stale_gradients()
        self._running = []
        self._run_in_background()

    def leave(self, unit: Unit, raised: bool) -> None:
        """Record that the forward pass leaves a unit; at the end of the pass, update the order of units."""
        self._depth -= 1
        if self._depth:
            return
        self._background.close()
        for other in self.units:
            if other._gathering:  # prefetched but not used
                other.free()
        # Buckets must be launched in the same order on all ranks, so build a new reducer if the order of units changed.
        if not raised and self._running != self._order:
            self._order = self._running
            # Gradients become ready roughly in the reverse order of the forward pass.
            flats = [flat for unit in reversed(self._order) for flat in unit.flats if flat.trained]
            names = {leaf: place[0][2] for flat in flats for leaf, place in zip(flat.leaves, flat.places, strict=True)}
            self.reducer = Reducer(flats, ReduceScatter(self.comm), self.root.module, "inline", names)

    def prefetch(self, unit: Unit, step: int) -> None:
        """Launch the all-gather of the next unit: ``step`` is 1 in the forward pass and -1 in the backward pass."""
        if unit in self._order:
            place = self._order.index(unit) + step
            if 0 <= place < len(self._order):
                self._order[place].start_gathering()

    def backward_begins(self) -> None:
        """Prepare the gradient buckets when the backward pass reaches its first unit."""
        if torch.is_grad_enabled():
            raise DtlibError(
                "fully_shard frees parameters that second derivatives need: leave create_graph=True out, or train "
                "with DataParallel or ZeroOptimizer."
            )
        if not self._in_backward:
            self._in_backward = True
            for flat in self.reducer.buckets if self.synchronising and self.reducer else []:
                flat.begin()
            self._run_in_background()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _run_in_background(self) -> None:
        if self.root.progress == "thread":
            self._background.enter_context(progress_thread())

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._background.close()
        for unit in self.units:
            unit.free()


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a module, or None."""
    return vars(module).get("_unit")


def plan_of(unit: Unit) -> Plan:
    """Return the plan of the unit's model, and create it if this is the first call.

    The unit that was called first is the root.
    """
    return unit.plan or Plan(unit)


def _tensors_in(output):
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors_in(list(vars(leaf).values()))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _check(names: dict, comm) -> None:
    for parameter, name in names.items():
        if parameter.is_meta:
            raise DtlibError(f"{name} is on the meta device, without values: build the model on a real device.")
        if other := info_of(parameter).sharded_as:
            raise DtlibError(
                f"{name} is shared with {other} of another unit: call fully_shard on a module that "
                "contains both, and not on either of them."
            )
        if parameter._backward_hooks or hooks_of_others(parameter):
            raise DtlibError(
                f"{name} has a gradient hook (from you, DataParallel or ZeroOptimizer), which fully_shard would lose: "
                "take a fresh model, or remove the hook."
            )
    check_same_model({name: parameter for parameter, name in names.items()}, comm, "fully_shard")
