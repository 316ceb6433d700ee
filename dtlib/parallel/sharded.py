"""ZeRO stage 3: every rank keeps an equal part of everything; parameters are whole only while they are used.

    at rest     rank 0: part 0    rank 1: part 1 ...      parameters, gradients, optimizer states
    forward     all_gather, compute, free                 unit by unit
    backward    all_gather, compute, reduce_scatter, free

A *unit* is a module whose parameters are gathered and freed together; at the top of a model there is one for all that
is in no other. A rank never holds more than its parts and the units that compute now. Parameters travel twice and
gradients once: 3 P (N-1)/N elements a step, where data parallelism sends 2 P (N-1)/N.

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.3;
Y. Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 16(12), 2023.
"""

from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dtlib.backward import progress_for
from dtlib.comm import as_communicator, types
from dtlib.comm.waiting import progress_thread
from dtlib.errors import DtlibError
from dtlib.flat import FlatBuffer, Shards
from dtlib.precision import clip_by_norm
from dtlib.reduction import GradientShard, Reducer, share_by_samples


def fully_shard(
    module: nn.Module, comm, reshard_after_forward: bool = True, prefetch: bool | None = None,
    progress: str | None = None, device="cpu",
) -> nn.Module:  # fmt: skip
    """Make ``module`` a unit of stage 3, in place, with those of its parameters that are in no unit yet; returns it.

    Call it on the parts of a model first, then on the model. Between steps the model's parameters are this rank's
    parts: one-dimensional, maybe empty. Make the optimizer afterwards, of these. All values are rank 0's.

        for layer in model.layers:
            fully_shard(layer, comm)
        fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters())     # element-wise ones only

    Args:
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        reshard_after_forward: free parameters after the forward pass and gather them anew for the backward pass; else
            they stay, as in stage 2.
        prefetch: gather the next unit, in the order of the last forward pass, while this one computes. By default
            where computing leaves the cores idle: on an accelerator, or with an emulated network.
        progress: who moves messages on meanwhile, as for ``DataParallel``.
        device: where parameters on the meta device come to life, unit by unit, by ``reset_parameters()`` of their
            modules: a model that is built under ``torch.device("meta")`` is never whole on any rank.

    The module gets ``no_sync()``, ``clip_grad_norm_(max_norm)``, and ``batch_size``, which weights this rank's
    gradients by its samples. All ranks must run the units in the same order; one without samples runs an empty batch.

    Counterparts: ``torch.distributed.fsdp.fully_shard``; DeepSpeed's ZeRO stage 3.

    Raises:
        DtlibError: for a parameter that modules of two units share, one that cannot be averaged, and a module that
            cannot be brought to life; by name.
    """
    if _unit_of(module) is not None:
        raise DtlibError(f"This {type(module).__name__} is a unit already: call fully_shard once for each module.")
    module.__dict__["_unit"] = Unit(module, as_communicator(comm), reshard_after_forward, prefetch, progress, device)
    module.__class__ = type(f"Sharded{type(module).__name__}", (FullySharded, type(module)), {})
    return module


class FullySharded:
    """What ``fully_shard`` adds to a module; called on the whole model."""

    batch_size = None

    @contextmanager
    def no_sync(self):
        """Backward passes in this context add up whole gradients on each rank; the first one after it averages them."""
        plan = _plan_of(self)
        before, plan.synchronising = plan.synchronising, False
        try:
            yield
        finally:
            plan.synchronising = before

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients down together so that their joint 2-norm, over the parts of all ranks, is at most
        ``max_norm``; returns the norm before."""
        return clip_by_norm([parameter.grad for parameter in self.parameters()], max_norm, self._unit.comm)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Memory that is kept for this model, by what it is for (accounting.py)."""
        plan = _plan_of(self)
        flats = [flat for unit in plan.units for flat in unit.flats]
        return {
            "parameters": [flat.shard for flat in flats],
            "gradients": [flat.gradients.average for flat in flats if flat.gradients],
            "communication": [flat.whole.flat for flat in flats] + (plan.reducer.staging() if plan.reducer else []),
        }


def units_of(model: nn.Module) -> list[nn.Module]:
    """Modules that make good units: the repeated layers of a model, each an element of a ``ModuleList`` or
    ``Sequential``, as far as they share no parameter with the rest."""
    owners = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    names = {module: name for name, module in model.named_modules()}
    found = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for module in container:
                inside, prefix = list(module.parameters()), f"{names[module]}."
                alone = all(name.startswith(prefix) for parameter in inside for name in owners[parameter])
                if inside and alone and not any(prefix.startswith(f"{names[other]}.") for other in found):
                    found.append(module)
    return found


class Unit:
    """The parameters of a module that are gathered and freed together."""

    def __init__(self, module, comm, reshard_after_forward, prefetch, progress, device):
        self.module, self.comm, self.reshard_after_forward = module, comm, reshard_after_forward
        _bring_to_life(module, device)
        self.names = {parameter: places[0][2] for parameter, places in _places(module).items()}
        _check(self.names, comm)
        for owner in _own_modules(module):
            for buffer in owner.buffers(recurse=False):
                comm.broadcast(buffer)
        self.progress = progress_for(comm, self.names, progress, "fully_shard")
        self.prefetch = self.progress == "thread" if prefetch is None else prefetch
        kinds = {}
        for parameter, places in _places(module).items():
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            kinds.setdefault(kind, {})[parameter] = places
        self.flats = [Flat(same, comm) for same in kinds.values()]
        for leaf in (leaf for flat in self.flats if flat.gradients for leaf in flat.leaves):
            leaf.register_post_accumulate_grad_hook(self._gradient_has_come)
        self.plan = None
        self._gathering = []  # handles of a gathering under way
        self._uses = 0  # forward passes through this module that have not ended
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def start_gathering(self) -> None:
        """Begin to make all parameters whole."""
        for flat in self.flats:
            if flat.is_free():
                flat.make_room()
                self._gathering.append(self.comm.all_gather(flat.memory(), flat.shard, async_op=True))

    def gather(self) -> None:
        """Make all parameters whole, and give them to the modules."""
        self.start_gathering()
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.show(flat.leaves)

    def free(self) -> None:
        """Back to this rank's parts."""
        while self._gathering:
            self._gathering.pop(0).wait()
        for flat in self.flats:
            flat.free()

    # What autograd and modules call

    def _before_forward(self, module, inputs) -> None:
        self._uses += 1
        self.plan = _plan_of(module)
        if not _in_backward():  # else activation checkpointing computes it once more
            self.plan.enter(self)
        self.gather()
        if self.prefetch and not _in_backward():
            self.plan.prefetch(self, +1)

    def _after_forward(self, module, inputs, output) -> None:
        self._uses -= 1
        differentiable = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
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

    def _gradient_has_come(self, leaf) -> None:
        if self.plan.synchronising:
            self.plan.reducer.gradient_has_come(leaf)


class Flat:
    """Parameters of one kind in a unit, one after the other: this rank's part at rest, all of it in between.

    ``places`` says for each parameter which modules have it, and under which attribute: several where it is tied.
    """

    def __init__(self, places: dict, comm):
        first = next(iter(places))
        trained = first.requires_grad
        self.places = list(places.values())
        self.shards = Shards([parameter.shape for parameter in places], comm.rank, comm.size)
        self.whole = FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)
        for parameter, view in zip(places, self.whole.views, strict=True):
            view.copy_(parameter.detach())
            parameter.sharded_as = places[parameter][0][2]
        self.shard = torch.zeros(self.shards.length, dtype=first.dtype, device=first.device)
        comm.scatter(self.shard, self.memory(), 0)
        self.leaves = [nn.Parameter(view, trained) for view in self.whole.views]
        self.pieces = [nn.Parameter(view, trained) for view in self.shards.views(self.shard)]
        for piece, part in zip(self.pieces, self.shards.parts, strict=True):
            piece.part = part
        self.gradients = GradientShard(self.leaves, self.shards) if trained else None
        self.averages = self.shards.views(self.gradients.average) if trained else []
        self._bytes = self.whole.flat.untyped_storage().nbytes()
        self.free()

    def is_free(self) -> bool:
        return self.whole.flat.untyped_storage().nbytes() == 0 and self._bytes > 0

    def memory(self) -> torch.Tensor:
        """All parameters, under another tensor: whoever looks at one with numpy fixes the size of its storage, and
        whoever writes into one through torch changes it in the eyes of autograd."""
        return torch.from_dlpack(self.whole.flat)

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

    def begin(self) -> None:
        """A backward pass begins: its averages are added to those that pieces have, if they have any."""
        kept = [piece.grad is not None for piece in self.pieces]
        self.gradients.forget()
        self.gradients.collected = any(kept)
        for piece, view in zip(self.pieces, self.averages, strict=True):
            if any(kept) and piece.grad is None:
                view.zero_()
            elif any(kept) and piece.grad is not view:  # changed from outside
                view.copy_(piece.grad)

    def finish(self, used) -> None:
        """All averages have come. A parameter that no rank has used keeps what it had."""
        for piece, view in zip(self.pieces, self.averages, strict=True):
            if next(used):
                piece.grad = view


class Plan:
    """What the units of one model share: their order, and who averages gradients."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.units = [_unit_of(module) for module in root.modules() if _unit_of(module) is not None]
        self.synchronising = True
        self.reducer = None
        self._order = []  # units, in the order in which the last forward pass came to them
        self._running = []  # that of this one, so far
        self._depth = 0
        self._in_backward = False
        self._background = ExitStack()  # the progress thread while a pass is under way
        comm = root._unit.comm
        # Gradients travel on a communicator of their own: ranks may differ in what they gather meanwhile.
        self._comm = comm if getattr(comm, "simulated", False) else comm.split(0)

    def enter(self, unit: Unit) -> None:
        """The forward pass comes to a unit."""
        if self._depth == 0:
            self._begin_forward()
        self._depth += 1
        if unit not in self._running:
            self._running.append(unit)

    def _begin_forward(self) -> None:
        self._background.close()
        if self.reducer:
            self.reducer.check()
        if self._in_backward:  # which raised
            self._backward_ends()
        for flat in self._trained(self.units):
            for piece in flat.pieces:
                if not piece.requires_grad:
                    raise DtlibError(
                        "A parameter was frozen after fully_shard: build the model anew, and freeze it first."
                    )
        self._running = []
        self._run_in_background()

    def leave(self, unit: Unit, raised: bool) -> None:
        """The forward pass leaves a unit."""
        self._depth -= 1
        if self._depth:
            return
        self._background.close()
        for other in self.units:
            if other._gathering:  # prefetched, and not needed
                other.free()
        if not raised and self._running != self._order:
            self._order = self._running
            shards = [flat.gradients for flat in self._trained(self._order)]
            names = {
                leaf: place[0][2]
                for flat in self._trained(self._order)
                for leaf, place in zip(flat.leaves, flat.places, strict=True)
            }
            self.reducer = Reducer(
                shards, self._comm, self._share, "inline", names, self._averages_have_come, self._gradients_have_left
            )

    def prefetch(self, unit: Unit, step: int) -> None:
        """Begin to gather the unit that comes next: forward with ``step`` 1, backward with -1."""
        if unit in self._order:
            place = self._order.index(unit) + step
            if 0 <= place < len(self._order):
                self._order[place].start_gathering()

    def backward_begins(self) -> None:
        """The backward pass comes to its first unit."""
        if not self._in_backward:
            self._in_backward = True
            self._run_in_background()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _run_in_background(self) -> None:
        if self.root._unit.progress == "thread":
            self._background.enter_context(progress_thread())

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._background.close()
        for unit in self.units:
            unit.free()

    def _trained(self, units) -> list[Flat]:
        """Their gradients come roughly in the reverse order of the forward pass."""
        return [flat for unit in reversed(units) for flat in unit.flats if flat.gradients]

    def _share(self) -> float | None:
        for flat in self._trained(self._order):
            flat.begin()
        return share_by_samples(self._comm, self.root.batch_size)

    def _gradients_have_left(self, shard) -> None:
        """What computed them is not needed any more; frozen parameters may be, and stay until the end of the pass."""
        next(flat for flat in self._trained(self._order) if flat.gradients is shard).free()

    def _averages_have_come(self) -> None:
        used = self.reducer.used_anywhere()
        for flat in self._trained(self._order):
            flat.finish(used)


def _unit_of(module) -> Unit | None:
    return module.__dict__.get("_unit")


def _plan_of(module) -> Plan:
    """The plan of the model that a unit is part of: of the module that was called first."""
    unit = _unit_of(module)
    if unit.plan is None:
        plan = Plan(module)
        for member in plan.units:
            member.plan = plan
    return unit.plan


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _own_modules(module, prefix: str = "") -> dict[nn.Module, str]:
    """The modules inside of one that are in no unit of their own, with the beginnings of their parameters' names."""
    found = {module: prefix}
    for name, child in module.named_children():
        if _unit_of(child) is None:
            found = _own_modules(child, f"{prefix}{name}.") | found
    return found


def _places(module) -> dict[nn.Parameter, list]:
    """For each parameter that is in no unit yet: the modules that have it, under which attribute and full name."""
    places = {}
    for owner, prefix in _own_modules(module).items():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, attribute, prefix + attribute))
    return places


def _bring_to_life(module, device) -> None:
    """Give parameters and buffers on the meta device memory and first values, as far as this unit goes."""
    alive, without = {}, set()
    for owner in _own_modules(module):
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in alive:
                        memory = torch.empty_like(tensor, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        alive[tensor] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                    tensors[name] = alive[tensor]
                    without.add(owner)
    for owner in reversed(_own_modules(module)):  # the innermost first, as when they are constructed
        if owner in without:
            reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
            if reset is None:
                raise DtlibError(
                    f"{type(owner).__name__} has parameters or buffers on the meta device and no reset_parameters() "
                    "that gives them values: add that method, or build the model on a real device."
                )
            reset()


def _check(names: dict, comm) -> None:
    for parameter, name in names.items():
        if hasattr(parameter, "sharded_as"):
            raise DtlibError(
                f"{name} is shared with {parameter.sharded_as} of another unit: call fully_shard on a module that "
                "contains both, and not on either of them."
            )
        if types.type_name(parameter) not in types.FLOATS:
            raise DtlibError(
                f"fully_shard takes {', '.join(types.FLOATS)}, and {name} is {types.type_name(parameter)}: convert it."
            )
    mine = {name: (tuple(parameter.shape), types.type_name(parameter)) for parameter, name in names.items()}
    for rank, theirs in enumerate(comm.all_gather_object(mine)):
        for name in mine.keys() | theirs.keys():
            if mine.get(name) != theirs.get(name):
                raise DtlibError(
                    f"The models differ: {name} is {mine.get(name, 'missing')} on rank {comm.rank} and "
                    f"{theirs.get(name, 'missing')} on rank {rank}. Build the same model on all ranks."
                )
