"""Live and peak bytes of pipelines against a formula of named terms, on every rank and at every micro-batch.

    base      parameters, gradients, and the rank's batch: inputs on the first, targets on the last
    inputs    what was received for micro-batches in flight, until their backward pass
    kept      what autograd keeps of micro-batches in flight
    pass      what one forward or backward pass needs while it runs; measured in a process that does nothing else
    ahead     tensors for messages that are asked for before they are needed
    losses    a number for each micro-batch, on the last rank

Not counted, as no operation of torch allocates it: torch's random state, 5,056 bytes, which recomputation keeps for
each micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from dtlib.measure.live import Live
from dtlib.parallel.pipeline import Linear, PipelineStage, defer_weight_gradients, plain
from dtlib.parallel.pipeline.interpreter import AHEAD
from dtlib.parallel.pipeline.linear import weights_at_once
from dtlib.parallel.pipeline.stage import _recomputed
from dtlib.schedule import Action
from tests.cases import all_cases
from tests.ranks import on_ranks
from tests.test_pipeline import SCHEDULES

ROWS, WIDTH = 8, 24
NUMBER = 4  # bytes
BORDER = NUMBER * ROWS * WIDTH  # bytes of what travels for a micro-batch
MICROBATCHES = 4, 8, 32


def layers(linear=nn.Linear):
    """Autograd keeps the input and what Tanh gave, and neither the first Linear's output nor the last one's. It has
    gradients, which are added to."""
    module = nn.Sequential(linear(WIDTH, WIDTH), nn.Tanh(), linear(WIDTH, WIDTH))
    module(torch.zeros(1, WIDTH)).sum().backward()
    return module


def states(*modules):
    return [tensor for module in modules for p in module.parameters() for tensor in (p, p.grad)]


@dataclass
class Pass:
    """Bytes of one pass, without its input: at most while it runs, and more, or less, once it is over."""

    peak: int
    more: int


def passes_alone(module, is_first, is_last, forward, halved=False) -> dict[str, Pass]:
    """Each pass over one micro-batch, in a process that does nothing else."""
    x, target = torch.ones(2, ROWS, WIDTH).unbind()
    x, target, halves, passes = x.clone().requires_grad_(not is_first), target.clone(), [], {}
    gradient = torch.Size(()) if is_last else x.shape

    def backward(edge):
        with defer_weight_gradients() if halved else weights_at_once() as later:
            torch.autograd.backward(edge.pop(), torch.ones(gradient))
        halves.extend(later or ())
        x.grad = None

    def weights():
        for half in halves:
            half()
        halves.clear()

    def output():
        y = forward(module, x)
        return [get_gradient_edge(mse_loss(y, target) / 1 if is_last else y)]

    with Live(x, target, *states(module)) as live:

        def measure(kind, run):
            before = live.peak = live.now
            result = run()
            passes[kind] = Pass(live.peak - before, live.now - before)
            return result

        edge = measure("F", output)
        measure("I" if halved else "B", partial(backward, edge))
        if halved:
            measure("W", weights)
    return passes


def expected(actions, base: int, passes: Callable, ahead: Callable, is_first: Callable, is_last: Callable,
             ends_input: Callable = lambda action: action.kind in "BW"):  # fmt: skip
    """Bytes alive when each forward pass begins, and the most while any action runs."""
    alive, peak, at_forward = base, 0, []
    for place, action in enumerate(actions):
        its = passes(action)
        asked_for = ahead(place)
        if action.kind == "F":
            alive += 0 if is_first(action.stage) else BORDER  # inputs
            at_forward.append(alive + asked_for)
        peak = max(peak, alive + asked_for + its.peak)
        alive += its.more
        if action.kind == "F" and is_last(action.stage):
            alive += NUMBER  # losses
        if ends_input(action) and not is_first(action.stage):
            alive -= BORDER
    return at_forward, peak


def ahead_in_full(actions, is_first, is_last):
    """Bytes for messages of later actions while an action runs: of AHEAD, those that know what will arrive."""
    places = {action: place for place, action in enumerate(actions)}

    def of(place):
        later = actions[place + 1 : place + 1 + AHEAD]
        inputs = sum(action.kind == "F" and not is_first(action.stage) for action in later)
        known = [places[action._replace(kind="F")] < place for action in later if action.kind in "BI"]
        ends = [is_last(action.stage) for action in later if action.kind in "BI"]
        return BORDER * (inputs + sum(one and not end for one, end in zip(known, ends, strict=True)))

    return of


def ahead_in_plain(actions, is_first, is_last):
    """One tensor for each direction, from its first message to its last but one; and a number that looks like it."""
    stage, microbatches = actions[0].stage, len(actions) // 2

    def of(place):
        forward, backward = (sum(action.kind == kind for action in actions[: place + 1]) for kind in "FB")
        inputs = 0 if is_first(stage) else BORDER * (0 < forward < microbatches) + NUMBER
        return inputs + (0 if is_last(stage) else BORDER * (0 < backward < microbatches) + NUMBER * (place > 0))

    return of


def send_at_once(comm):
    """Have each send end before it returns: nothing is on its way at a time that nobody knows."""
    send = comm.send

    def sent(*arguments, **settings):
        handle = send(*arguments, **settings)
        handle.wait()
        return handle

    comm.send = sent
    return comm


def counted(modules, tensors, run):
    """Bytes alive when each forward pass began, at most, and at the end; in the second step of two."""
    at_forward = []
    run()
    with Live(*states(*modules), *tensors) as live:
        hooks = [module.register_forward_pre_hook(lambda *_: at_forward.append(live.now)) for module in modules]
        result = run()
        del result
    for hook in hooks:
        hook.remove()
    return at_forward, live.peak, live.now


def batch(comm, microbatches):
    """Inputs on the first rank and targets on the last."""
    tensors = torch.ones(2, ROWS * microbatches, WIDTH).unbind()
    return tensors[0].clone() if comm.rank == 0 else None, tensors[1].clone() if comm.rank == comm.size - 1 else None


def nbytes(*tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@on_ranks(2, 3, 4, slow=(3,))
def test_a_plain_pipeline_holds_what_the_formula_says(world):
    comm = send_at_once(world.comm.split(0))
    first, last = (lambda stage: stage == 0), (lambda stage: stage == comm.size - 1)
    passes = passes_alone(layers(), first(comm.rank), last(comm.rank), nn.Module.__call__)
    assert passes["F"].more == BORDER * (1 + last(comm.rank))  # what Tanh gave, and what the loss keeps
    with all_cases() as case:
        for name, microbatches in product(("gpipe", "1f1b"), MICROBATCHES):
            module, (x, y) = layers(), batch(comm, microbatches)
            order = plain.order(name, comm.rank, comm.size, microbatches)
            actions = [Action(comm.rank, *action) for action in order]
            base, ahead = nbytes(*states(module), x, y), ahead_in_plain(actions, first, last)
            run = partial(plain.step, comm, module, x, y, mse_loss, microbatches, name)
            at_forward, peak, end = counted([module], [one for one in (x, y) if one is not None], run)
            with case(name, microbatches):
                assert (at_forward, peak) == expected(actions, base, lambda a: passes[a.kind], ahead, first, last)
                assert end == base


@on_ranks(2, 3, 4, slow=(3, 4))
def test_a_pipeline_holds_what_the_formula_says(world):
    with all_cases() as case:
        for name, recompute, groups in product(SCHEDULES, (False, True), (2, 8)):
            with case(name, recompute, groups):
                holds_what_the_formula_says(world.comm, name, recompute, groups * world.size)


def holds_what_the_formula_says(comm, name, recompute, microbatches):
    halved, stages = name == "zb-h1", comm.size * (2 if name == "interleaved" else 1)
    first, last = (lambda stage: stage == 0), (lambda stage: stage == stages - 1)
    linear, indices = Linear if halved else nn.Linear, range(comm.rank, stages, comm.size)
    modules, (x, y) = [layers(linear) for _ in indices], batch(comm, microbatches)
    pairs = zip(modules, indices, strict=True)
    schedule = SCHEDULES[name](
        [PipelineStage(module, index, stages, comm) for module, index in pairs], microbatches, mse_loss, recompute
    )
    send_at_once(schedule.comm)

    def again(module, x):
        return _recomputed(module, [x], {})

    def at_once(module, x):  # the last one, of a batch that layers may change in place
        return module(x.clone() if recompute and not x.requires_grad else x)

    passes = {
        (index, way): passes_alone(layers(linear), first(index), last(index), way, halved)
        for index, way in product(indices, (again, at_once))
    }

    def way_of(action):
        return again if recompute and action.microbatch < microbatches - 1 else at_once

    def its_pass(action):
        return passes[action.stage, way_of(action)][action.kind]

    def ends_input(action):  # what is computed again has a copy, which the second half keeps
        return action.kind in ("BI" if way_of(action) is again else "BW")

    base = nbytes(*states(*modules), x, y)
    ahead = ahead_in_full(schedule.actions, first, last)
    arguments, tensors = [x] if x is not None else [], [one for one in (x, y) if one is not None]
    run = partial(schedule.step, *arguments, target=y, return_outputs=False)
    at_forward, peak, end = counted(modules, tensors, run)
    if recompute:
        assert all(passes[index, again]["F"].more == BORDER * last(index) for index in indices)  # what the loss keeps
    wanted, most = expected(schedule.actions, base, its_pass, ahead, first, last, ends_input)
    assert (peak, end) == (most, base)
    if not recompute:  # which runs forward passes again
        # What arrives is announced with the first micro-batch of each stage: until then less may have been asked for.
        forward = [place for place, action in enumerate(schedule.actions) if action.kind == "F"]
        settled = AHEAD + max(schedule.actions.index(Action(index, "F", 0)) for index in indices)
        for place, counted_, formula in zip(forward, at_forward, wanted, strict=True):
            assert counted_ == formula if place >= settled else counted_ <= formula, (place, at_forward, wanted)


LARGE = 256  # times as many rows: messages that leave when the other rank has asked for them, whenever that is


@on_ranks(2, 4, slow=(4,))
def test_border_tensors_of_1f1b_are_as_many_as_there_are_micro_batches_in_flight(world):
    """And their bytes do not grow with micro-batches. The last rank's loss keeps its input."""
    comm, microbatches = world.comm.split(0), 32
    border, in_flight, is_last = BORDER * LARGE, comm.size - comm.rank, comm.rank == comm.size - 1
    x, y = (one if one is None else one.repeat(LARGE, 1) for one in batch(comm, microbatches))
    module = layers()
    stage = PipelineStage(module, comm.rank, comm.size, comm)
    full = SCHEDULES["1f1b"](stage, microbatches, mse_loss)
    arguments = [] if x is None else [x]
    base = nbytes(*states(module), x, y)
    kept = in_flight * border * (1 + is_last)
    inputs, ahead = in_flight * border, 2 * border
    leaving = (2 * in_flight + 1) * border  # at most the outputs in flight, and as many gradients and one
    work = 3 * border + module[0].weight.nbytes + LARGE * NUMBER  # of a pass, with a gradient of a weight
    for run in (
        partial(plain.step, comm, module, x, y, mse_loss, microbatches, "1f1b"),
        partial(full.step, *arguments, target=y, return_outputs=False),
    ):
        at_forward, peak, _ = counted([module], [one for one in (x, y) if one is not None], run)
        assert len(at_forward) == microbatches
        assert peak <= base + kept + inputs + ahead + leaving + work + microbatches * NUMBER
