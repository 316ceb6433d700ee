"""The schedule explorer: sliders, a simulated schedule, and the same schedule on the engines.

The stages are EMULATED: each computes a small layer and then sleeps for the time of its action. So more ranks than
cores can work at the same time. The schedule, its messages and the gradients are real.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

import dtlib
from dtlib import schedule as schedules
from dtlib.comm.waiting import progress_thread
from dtlib.lessons.l07.figures import measured, picture
from dtlib.measure.trace import Timeline
from dtlib.parallel import pipeline
from dtlib.parallel.pipeline.linear import defer

SECONDS = 0.02  # time of a forward pass on a rank
STAGES_A_RANK = 2  # in the interleaved schedule
ROWS, ELEMENTS = 16, 64  # shape of a micro-batch in float32
MESSAGE_BYTES = 4 * ROWS * ELEMENTS


@dataclass(frozen=True)
class Order:
    """A schedule by name: its name in ``formulas``, the class that runs it, and stages per rank."""

    formulas: str
    runs: type
    chunks: int = 1

    def actions(self, ranks: int, microbatches: int) -> list:
        """Return the actions of all ranks."""
        return self.runs.order(ranks, microbatches, ranks * self.chunks)


ORDERS = {
    "GPipe": Order("gpipe", pipeline.ScheduleGPipe),
    "1F1B": Order("one_f_one_b", pipeline.Schedule1F1B),
    "interleaved 1F1B": Order("interleaved", pipeline.ScheduleInterleaved1F1B, STAGES_A_RANK),
    "ZB-H1": Order("zero_bubble_h1", pipeline.ScheduleZeroBubbleH1),
}


def given(actions: list) -> Order:
    """Return an order from actions of all ranks, with one stage per rank."""

    class Given(pipeline.ScheduleGPipe):
        order = staticmethod(lambda ranks, microbatches, stages: actions)

    return Order("gpipe", Given)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        time.sleep(stage.forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        half = ctx.stage.backward_seconds / 2
        time.sleep(half)
        defer(lambda: time.sleep(half))  # a zero-bubble schedule does this half later
        return gradient, None


class EmulatedStage(nn.Module):
    """A module on an EMULATED accelerator: it computes real values, then sleeps and leaves the core free.

    ``forward`` and ``backward`` are the seconds of its passes.
    """

    def __init__(self, module: nn.Module, forward: float, backward: float):
        super().__init__()
        self.module, self.forward_seconds, self.backward_seconds = module, forward, backward

    def forward(self, x):
        """Apply the module, and sleep."""
        return _Sleep.apply(self.module(x), self)


def simulate(name: str, ranks: int, microbatches: int, backward: float = 2.0, message: float = 0.0):
    """Simulate an entry of ``ORDERS``; times are in forward passes of a rank over all its stages."""
    order = ORDERS[name]
    actions = order.actions(ranks, microbatches)
    return schedules.simulate(actions, 1 / order.chunks, backward / order.chunks, message=message)


def run(name: str | list, ranks: int, microbatches: int, backward: float = 2.0, message: float = 0.0,
        one_by_one: bool = False, thread: bool = True) -> tuple:  # fmt: skip
    """Run one step on the first ``ranks`` ranks; return this rank's trace and its peak number of activations.

    All ranks call this function. ``name`` is an entry of ``ORDERS``, or a list of actions for each rank.

    ``backward`` and ``message`` are times in forward passes of ``SECONDS``. A message takes ``message`` on an EMULATED
    network. By default this is latency, so that many messages can be in flight. With ``one_by_one`` it is limited
    bandwidth, so that messages leave one after another. With ``thread`` a thread advances pending messages while the
    rank sleeps.
    """
    world, order = dtlib.init(), ORDERS[name] if isinstance(name, str) else given(name)
    comm = world.comm.split(0 if world.rank < ranks else None)
    if comm is not None:
        schedule = _schedule(order, comm, microbatches)
        x = torch.ones(ROWS * microbatches, ELEMENTS)
        inputs, target = ([x] if comm.rank == 0 else []), (x if schedule.stages[-1].is_last else None)
        schedule.step(*inputs, target=target)  # the first step of a process takes longer
        for stage in schedule.stages:
            stage.submodule.forward_seconds = SECONDS / order.chunks
            stage.submodule.backward_seconds = backward * SECONDS / order.chunks
        if message:
            travel = message * SECONDS
            latency, bandwidth = (0.0, MESSAGE_BYTES / travel) if one_by_one else (travel, 1e12)
            schedule.comm = comm.emulate_network(latency, bandwidth)
    world.comm.barrier()
    with dtlib.trace() as trace, progress_thread() if thread else nullcontext():
        if comm is not None:
            schedule.step(*inputs, target=target)
    return trace, schedule.peak_in_flight if comm is not None else 0


def _schedule(order: Order, comm, microbatches: int):
    """Return a schedule of stages that do not sleep yet."""
    stages = comm.size * order.chunks
    own = [
        pipeline.PipelineStage(EmulatedStage(_Scale(), 0, 0), index, stages, comm)
        for index in range(comm.rank, stages, comm.size)
    ]
    return order.runs(own, microbatches, lambda output, target: output.mean())


class _Scale(nn.Module):
    """A layer that computes as little as possible."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMENTS))

    def forward(self, x):
        """Return ``x`` times the weight."""
        return x * self.weight


@dataclass
class Measured:
    """A step on the engines: ``simulation`` in forward passes, and each rank's peak number of activations."""

    simulation: schedules.Simulation
    peaks: list[int]


def measure(
    name: str | list, ranks: int, microbatches: int, backward: float = 2.0, message: float = 0.0, **other
) -> Measured:
    """Call ``run`` on the engines of this notebook; ``other`` are further arguments of ``run``."""
    from dtlib.lab.engines.engine_set import current

    answers = current().view.apply_async(run, name, ranks, microbatches, backward, message, **other)
    while not answers.done():
        answers.wait(0.1)  # short, so that Stop can interrupt it
    traces, peaks = zip(*answers.get()[:ranks], strict=True)
    return Measured(measured(Timeline(list(traces)), SECONDS), list(peaks))


def show(name: str, ranks: int, microbatches: int, backward: float = 2.0, message: float = 0.0,
         found: Measured | None = None) -> None:  # fmt: skip
    """Draw the simulated schedule, and the measured one below it."""
    order = ORDERS[name]
    panels = {f"{name}, simulated": simulate(name, ranks, microbatches, backward, message)}
    if found:
        panels["EMULATED stages, measured"] = found.simulation
    picture(panels)
    by_formula = schedules.formulas.bubble(order.formulas, ranks, microbatches, order.chunks)
    print(f"By the formula the bubble is {by_formula:.1%} of the makespan.")
    if found:
        print(f"Activations held on the engines, by rank: {' '.join(map(str, found.peaks))}")


class Explorer:
    """The sliders; ``box`` is the widget. ``show`` draws the same without widgets."""

    def __init__(self, engines: int):
        import ipywidgets

        look = {"style": {"description_width": "130px"}, "layout": {"width": "450px"}}

        def slider(kind, value, low, high, step, description):
            limits = {"value": value, "min": low, "max": high, "step": step}
            return kind(**limits, description=description, continuous_update=False, **look)

        whole, real = ipywidgets.IntSlider, ipywidgets.FloatSlider
        self.engines = engines
        self.name = ipywidgets.Dropdown(options=list(ORDERS), description="schedule", **look)
        self.ranks = slider(whole, 4, 1, 8, 1, "ranks")
        self.microbatches = slider(whole, 8, 1, 16, 1, "micro-batches")
        self.backward = slider(real, 2.0, 0.5, 4.0, 0.5, "backward / forward")
        self.message = slider(real, 0.0, 0.0, 2.0, 0.25, "message / forward")
        self.button = ipywidgets.Button(layout=look["layout"])
        self.output = ipywidgets.Output()
        self.settings = [self.name, self.ranks, self.microbatches, self.backward, self.message]
        for setting in self.settings:
            setting.observe(lambda _: self.draw(), names="value")
        self.button.on_click(lambda _: self.draw(run=True))
        self.box = ipywidgets.VBox([*self.settings, self.button, self.output])
        self.draw()

    def draw(self, run: bool = False) -> None:
        """Simulate, and run on the engines if ``run`` is set; print an error if the schedule is impossible."""
        arguments = [setting.value for setting in self.settings]
        self._label("runs on the engines", False)
        self.output.clear_output(wait=True)
        with self.output:
            try:
                show(*arguments, found=measure(*arguments) if run else None)
            except schedules.ScheduleError as problem:
                print(problem)
        if self.ranks.value <= self.engines:
            self._label("run it on the engines", True)
        else:
            self._label(f"needs {self.ranks.value} engines, and there are {self.engines}", False)

    def _label(self, text: str, enabled: bool) -> None:
        self.button.description, self.button.disabled = text, not enabled


def explore():
    """Show sliders for ranks, micro-batches, schedule and times; a button runs the schedule on the engines."""
    from dtlib.lab.drawing import show_widget
    from dtlib.lab.engines.engine_set import current

    show_widget(Explorer(current().size).box, "Sliders for a schedule; explorer.show draws the same without them.")
