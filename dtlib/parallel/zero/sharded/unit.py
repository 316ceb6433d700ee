"""A unit: the parameters of a module that are gathered and freed together, and the hooks that do it."""

from dataclasses import is_dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dtlib.errors import DtlibError
from dtlib.gradients.backward import progress_for
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import ShardedGradient
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shards import GradientShard
from dtlib.parallel.zero.sharded.places import bring_to_life, own_modules, places_of


class Unit:
    """The parameters of a module that are gathered and freed together."""

    def __init__(self, module, comm, reshard_after_forward, prefetch, progress, device, policy, plan_of):
        self.module, self.comm, self.reshard_after_forward = module, comm, reshard_after_forward
        bring_to_life(module, device)
        all_places = places_of(module)
        _check({parameter: places[0][2] for parameter, places in all_places.items()}, comm)
        for owner in own_modules(module):
            for buffer in owner.buffers(recurse=False):
                comm.broadcast(buffer)
        self.progress = progress_for(comm, all_places, progress, "fully_shard")
        self.prefetch = self.progress == "thread" if prefetch is None else prefetch
        kinds = {}
        for parameter, places in all_places.items():
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            kinds.setdefault(kind, {})[parameter] = places
        self.flats = [Flat(same, comm, policy) for same in kinds.values()]
        for leaf in (leaf for flat in self.flats if flat.gradients for leaf in flat.leaves):
            leaf.register_post_accumulate_grad_hook(self._gradient_is_ready)
        self.plan, self._plan_of = None, plan_of
        self._gathering = []  # handles of a gathering under way
        self._uses = 0  # forward passes through this module that have not ended
        if policy:
            policy.cast_around(module)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def start_gathering(self) -> None:
        """Begin to make all parameters whole."""
        for flat in self.flats:
            if flat.is_free():
                flat.make_room()
                self._gathering.append(self.comm.all_gather(flat.memory(), flat.to_send(), async_op=True))

    def gather(self) -> None:
        """Make all parameters whole, and give them to the modules."""
        self.start_gathering()
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.show(flat.leaves)

    def free(self) -> None:
        """Back to this rank's shards."""
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.free()

    # What autograd and modules call

    def _before_forward(self, module, inputs) -> None:
        if any(flat.summoned for flat in self.flats):
            raise DtlibError("This model computes within summon_full_params(): leave that context first.")
        self._uses += 1
        self.plan = self._plan_of(module)
        if not _in_backward():  # else activation checkpointing computes it once more
            self.plan.enter(self)
        self.gather()
        if self.prefetch and not _in_backward():
            self.plan.prefetch(self, +1)

    def _after_forward(self, module, inputs, output) -> None:
        self._uses -= 1
        differentiable = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
        if differentiable:
            torch.autograd.graph.register_multi_grad_hook(differentiable, self._before_backward, mode="any")
        if not _in_backward():
            if not self._uses and (self.reshard_after_forward or not differentiable):
                self.free()
            self.plan.leave(self, raised=output is None)

    def _before_backward(self, gradient) -> None:
        self.plan.backward_begins()
        self.gather()
        if self.prefetch:
            self.plan.prefetch(self, -1)

    def _gradient_is_ready(self, leaf) -> None:
        if self.plan.synchronising:
            self.plan.reducer.gradient_is_ready(leaf)
        else:
            next(flat for flat in self.flats if flat.gradients and leaf in flat.piece_of).mark(leaf)


class Flat:
    """Parameters of one kind in a unit, one after the other: this rank's shard at rest, all of it in between.

    ``places`` says for each parameter which modules have it, and under which attribute: several where it is tied.
    """

    def __init__(self, places: dict, comm, policy=None):
        first = next(iter(places))
        trained = first.requires_grad
        self.comm = comm
        self.places = list(places.values())
        self.shards = Shards([parameter.shape for parameter in places], comm.rank, comm.size)
        first_values = FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)
        for parameter, view in zip(places, first_values.views, strict=True):
            view.copy_(parameter.detach())
        self.shard = torch.zeros(self.shards.length, dtype=first.dtype, device=first.device)
        comm.scatter(self.shard, torch.from_dlpack(first_values.flat), 0)  # as in memory()
        computes_in = (policy and policy.param_dtype) or first.dtype
        self.whole = first_values
        if computes_in != first.dtype:
            self.whole = FlatBuffer(self.shards.shapes, computes_in, first.device, self.shards.padding)
        self.leaves = [nn.Parameter(view, trained) for view in self.whole.views]
        self.pieces = [nn.Parameter(view, trained) for view in self.shards.views(self.shard)]
        for parameter, leaf, piece, slice_ in zip(places, self.leaves, self.pieces, self.shards.slices, strict=True):
            for made in (leaf, piece):  # what others have noted at the parameter, such as tensor_parallel
                made.__dict__.update(parameter.__dict__)
            parameter.sharded_as = places[parameter][0][2]
            vars(piece)["slice"] = slice_
        reduced_in = (policy and policy.reduce_dtype) or computes_in
        self.gradients = GradientShard(self.leaves, self.shards, reduced_in, first.dtype) if trained else None
        averages = self.shards.views(self.gradients.average) if self.gradients else []
        self.averages = [average.as_subclass(ShardedGradient) for average in averages]
        self.piece_of = (
            dict(zip(self.leaves, zip(self.pieces, self.averages, strict=True), strict=True)) if trained else {}
        )
        self.summoned = False  # whole between passes: in summon_full_params
        self._bytes = self.whole.flat.untyped_storage().nbytes()
        self.free()

    def is_free(self) -> bool:
        return self.whole.flat.untyped_storage().nbytes() == 0 and self._bytes > 0

    def memory(self) -> torch.Tensor:
        """All parameters, under another tensor: whoever looks at one with numpy fixes the size of its storage, and
        whoever writes into one through torch changes it in the eyes of autograd."""
        return torch.from_dlpack(self.whole.flat)

    def to_send(self) -> torch.Tensor:
        """This rank's shard, in the type in which the whole computes."""
        return self.shard.to(self.whole.flat.dtype)

    def make_room(self) -> None:
        self.whole.flat.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """The tensors stay, as autograd knows them; their memory goes."""
        self.show(self.pieces)
        self.whole.flat.untyped_storage().resize_(0)

    def show(self, parameters) -> None:
        """Let modules find these under the names of their parameters."""
        for parameter, places in zip(parameters, self.places, strict=True):
            for module, attribute, _ in places:
                module._parameters[attribute] = parameter

    def summon(self) -> torch.Tensor:
        """Whole parameters in the type of the optimizer, for modules to find; ``dismiss`` takes what it returns."""
        self.check()
        whole = FlatBuffer(self.shards.shapes, self.shard.dtype, self.shard.device, self.shards.padding)
        self.comm.all_gather(whole.flat, self.shard)
        self.summoned = True
        self.show([nn.Parameter(view, self.gradients is not None) for view in whole.views])
        return whole.flat

    def dismiss(self, whole: torch.Tensor) -> None:
        own = torch.empty_like(self.shard)
        self.comm.scatter(own, whole, 0)
        self.shard.copy_(own)  # through torch, so that master weights see it
        self.summoned = False
        self.show(self.pieces)

    def check(self) -> None:
        """Between passes: refuse what has happened to this rank's shards and would be lost without a word."""
        for piece, own, places in zip(self.pieces, self.shards.views(self.shard), self.places, strict=True):
            changed = None
            if piece.requires_grad != (self.gradients is not None):
                changed = "frozen" if self.gradients else "unfrozen"
            elif piece.data_ptr() != own.data_ptr() or piece.dtype != own.dtype:
                changed = "converted or moved"
            elif any(module._parameters.get(attribute) is not piece for module, attribute, _ in places):
                changed = "replaced"
            elif piece._backward_hooks or getattr(piece, "_post_accumulate_grad_hooks", None):
                changed = "given a hook of its gradient, which autograd will not call,"
            if changed:
                raise DtlibError(
                    f"{places[0][2]} was {changed} after fully_shard: build the model anew, and do that first."
                )

    @torch.no_grad()
    def mark(self, leaf) -> None:
        """A gradient stays here, in no_sync(): that of the piece is what ``zero_grad()`` will set to None."""
        piece, view = self.piece_of[leaf]
        if piece.grad is None:
            piece.grad = view.zero_()

    def drop_what_was_dropped(self) -> None:
        """A forward pass begins: forget gradients that stayed here, if ``zero_grad()`` was called since."""
        for leaf, (piece, _) in self.piece_of.items():
            if piece.grad is None:
                leaf.grad = None

    def begin(self) -> None:
        """A backward pass begins: its averages are added to those that pieces have, if they have any."""
        assert self.gradients is not None
        kept = [piece.grad is not None for piece in self.pieces]
        self.gradients.forget()
        self.gradients.collected = any(kept)
        for piece, view in zip(self.pieces, self.averages, strict=True):
            if any(kept) and piece.grad is None:
                view.zero_()
            elif piece.grad is not None and piece.grad is not view:  # changed from outside
                view.copy_(piece.grad)

    def finish(self, used) -> None:
        """All averages have arrived. A parameter that no rank has used keeps what it had."""
        for piece, view in zip(self.pieces, self.averages, strict=True):
            if next(used):
                piece.grad = view


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
        if hasattr(parameter, "sharded_as"):
            raise DtlibError(
                f"{name} is shared with {parameter.sharded_as} of another unit: call fully_shard on a module that "
                "contains both, and not on either of them."
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise DtlibError(
                f"{name} has a hook of its gradient, as of a user, DataParallel or ZeroOptimizer, and fully_shard puts "
                "other parameters in its place: take a fresh model, or remove the hook."
            )
    check_same_model({name: parameter for parameter, name in names.items()}, comm, "fully_shard")
