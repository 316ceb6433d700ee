"""What the units of one model share: their order, and who averages their gradients."""

from contextlib import ExitStack

import torch
from torch import nn

from dtlib.comm.waiting import progress_thread
from dtlib.errors import DtlibError
from dtlib.gradients.shards import Reducer
from dtlib.parallel.zero.sharded.places import unit_of
from dtlib.parallel.zero.sharded.unit import Flat, Unit


class Plan:
    """What the units of one model share: their order, and who averages gradients."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.units = [unit_of(module) for module in root.modules() if unit_of(module) is not None]
        self.synchronising = True
        self.reducer: Reducer | None = None
        self._order: list[Unit] = []  # units, in the order of the last forward pass
        self._running: list[Unit] = []  # that of this one, so far
        self._depth = 0
        self._in_backward = False
        self._background = ExitStack()  # the progress thread while a pass is under way
        comm = unit_of(root).comm
        # Gradients travel on a communicator of their own: ranks may differ in what they gather meanwhile.
        self.comm = comm if getattr(comm, "simulated", False) else comm.split(0)

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
        for unit in self.units:
            for flat in unit.flats:
                flat.check()
                flat.drop_what_was_dropped()
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
            shards = [flat.gradients for flat in self._trained(self._order) if flat.gradients]
            names = {
                leaf: place[0][2]
                for flat in self._trained(self._order)
                for leaf, place in zip(flat.leaves, flat.places, strict=True)
            }
            self.reducer = Reducer(
                shards,
                self.comm,
                self._batch_size,
                "inline",
                names,
                self._averages_have_come,
                self._gradients_have_left,
            )

    def prefetch(self, unit: Unit, step: int) -> None:
        """Begin to gather the unit that comes next: forward with ``step`` 1, backward with -1."""
        if unit in self._order:
            place = self._order.index(unit) + step
            if 0 <= place < len(self._order):
                self._order[place].start_gathering()

    def backward_begins(self) -> None:
        """The backward pass comes to its first unit."""
        if torch.is_grad_enabled():
            raise DtlibError(
                "fully_shard frees parameters that second derivatives would need: leave create_graph=True out, or "
                "train with DataParallel or ZeroOptimizer."
            )
        if not self._in_backward:
            self._in_backward = True
            self._run_in_background()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _run_in_background(self) -> None:
        if unit_of(self.root).progress == "thread":
            self._background.enter_context(progress_thread())

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._background.close()
        for unit in self.units:
            unit.free()

    def _trained(self, units) -> list[Flat]:
        """Their gradients come roughly in the reverse order of the forward pass."""
        return [flat for unit in reversed(units) for flat in unit.flats if flat.gradients]

    def _batch_size(self) -> float | None:
        for flat in self._trained(self._order):
            flat.begin()
        return getattr(self.root, "batch_size", None)

    def _gradients_have_left(self, shard) -> None:
        """What computed them is not needed any more; frozen parameters may be, and stay until the end of the pass."""
        next(flat for flat in self._trained(self._order) if flat.gradients is shard).free()

    def _averages_have_come(self) -> None:
        assert self.reducer is not None
        used = self.reducer.used_anywhere()
        for flat in self._trained(self._order):
            flat.finish(used)


def plan_of(module) -> Plan:
    """The plan of the model that a unit is part of: of the module that was called first."""
    unit = unit_of(module)
    if unit.plan is None:
        plan = Plan(module)
        for member in plan.units:
            member.plan = plan
    return unit.plan
