"""The fault lab: a training on separate ranks, buttons that kill a rank, and a live curve of the loss.

These ranks are not engines, so a kill does not affect the notebook.
"""

import atexit
import html
import json
import tempfile
import threading
import time
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab.drawing import show_widget
from dtlib.lab.tables import Table, fold
from dtlib.lessons.l11b import figures
from dtlib.lessons.l11b.training import alone
from dtlib.recovery import Run, supervise

STEPS, SECONDS = 60, 0.05  # SECONDS is the EMULATED computation of a rank per step
DRAW_SECONDS = 0.3
LIMIT = 180.0  # longest run in seconds


def print_line(sentence: str) -> None:
    """Print a sentence, folded to the width of a page."""
    print(fold(sentence))


class Training:
    """A training on ``ranks`` ranks that recovers by ``by``: "checkpoint", "memory" or "shrink".

    ``say`` is called with each message.
    """

    def __init__(self, by: str, ranks: int = 4, say=print_line, **options):
        if by not in figures.NAMES:
            raise DtlibError(f"by={by!r}: choose one of {', '.join(map(repr, figures.NAMES))}.")
        self.by, self.ranks, self.say, self.runs = by, ranks, say, []
        self._folder = tempfile.TemporaryDirectory(prefix="dtlib-faults-")
        options = {"by": by, "steps": STEPS, "seconds": SECONDS, "time_limit": 30, **options}
        self._program = ["-m", "dtlib.lessons.l11b.training", json.dumps(options)]
        atexit.register(self.end)

    def go(self) -> "Training":
        """Run to the end, with restarts if recovery is by checkpoint; return self."""
        folder = Path(self._folder.name)
        try:
            if self.by == "checkpoint":
                supervise(self._program, self.ranks, folder, say=self.say, watch=self.runs.append)
            else:
                self.runs.append(Run(self._program, self.ranks, folder, survive=True, say=self.say).start())
                self.runs[0].wait(LIMIT)
        except DtlibError as problem:
            self.say(f"{problem}")
        return self

    @property
    def events(self) -> list[dict]:
        """The events of all runs."""
        return [event for run in list(self.runs) for event in list(run.events)]

    def kill(self, rank: int) -> None:
        """Send kill -9 to a rank, if it is alive."""
        if self.runs and rank in self.runs[-1].processes:
            self.runs[-1].send_signal(rank)

    def end(self) -> None:
        """End all processes, and delete the folder."""
        atexit.unregister(self.end)
        for run in self.runs:
            run.end()
        self._folder.cleanup()


def run(by: str, rank: int = 2, step: int = 25, **options) -> list[dict]:
    """Run a training in which one rank is killed at the beginning of a step; return its events."""
    killed = {"kind": "kill", "rank": rank, "step": step, "at": "begin"}
    training = Training(by, faults=[killed], **options)
    try:
        return training.go().events
    finally:
        training.end()


def now(ranks: int, events: list[dict], killable: bool) -> str:
    """Return the state of a training from the events of its last run, with the learner's next actions."""
    if not (steps := figures.steps_of(events)):
        return f"{ranks} processes start, which takes some seconds; the kill buttons wait for the first step."
    say = "press a kill button now" if killable and steps[-1]["step"] < STEPS else "it ends"
    return f"Training, step {steps[-1]['step']} of {STEPS}: {say}."


class FaultLab:
    """The widgets; ``box`` is shown. A thread updates them, so that other cells can run."""

    def __init__(self, ranks: int = 4):
        import ipywidgets

        self.ranks, self.histories, self.training, self._thread = ranks, {}, None, None
        self.undisturbed = alone({"steps": STEPS})[1]
        names = {name: by for by, name in figures.NAMES.items()}
        self.way = ipywidgets.Dropdown(options=names, value="shrink", description="recovery", layout={"width": "430px"})
        self.start_button = ipywidgets.Button(description="start a training", button_style="primary")
        self.kill_buttons = [
            ipywidgets.Button(description=f"kill rank {rank}", disabled=True, button_style="danger")
            for rank in range(ranks)
        ]
        self.now, self.sentences, self.picture, self.table = (ipywidgets.HTML() for _ in range(4))
        self.start_button.on_click(lambda _: self.start())
        for rank, button in enumerate(self.kill_buttons):
            button.on_click(lambda _, rank=rank: self.kill(rank))
        first, second = ipywidgets.HBox([self.way, self.start_button]), ipywidgets.HBox(self.kill_buttons)
        self.box = ipywidgets.VBox([first, second, self.now, self.sentences, self.picture, self.table])
        self._said = []
        self._draw()

    def start(self) -> None:
        """Start a training, unless one is running."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.start_button.disabled, self._said, self.sentences.value = True, [], ""
        self.training = Training(self.way.value, self.ranks, self._say)
        worker = threading.Thread(target=self.training.go, daemon=True)
        self._thread = threading.Thread(target=self._follow, args=(worker,), daemon=True)
        worker.start()
        self._thread.start()

    def kill(self, rank: int) -> None:
        """Kill a rank of the current training."""
        self.training.kill(rank)

    def _follow(self, worker) -> None:
        while worker.is_alive():
            time.sleep(DRAW_SECONDS)
            self._look()
        self._look()
        done = len(figures.steps_of(self.training.events)) and figures.steps_of(self.training.events)[-1]["step"]
        self._show_now(f"The training has ended, after step {done} of {STEPS}.")
        self.training.end()
        self.start_button.disabled = False

    def _look(self) -> None:
        training = self.training
        self.histories[training.by] = training.events
        living = training.runs[-1] if training.runs else None
        for rank, button in enumerate(self.kill_buttons):
            process = living and living.processes.get(rank)
            button.disabled = not (process and process.find() and figures.steps_of(living.events))
        self._show_now(
            now(self.ranks, living.events if living else [], killable=not all(b.disabled for b in self.kill_buttons))
        )
        self._draw()

    def _show_now(self, sentence: str) -> None:
        if sentence not in self.now.value:
            self.now.value = f"<div role='status' style='font-size:16px'><b>{html.escape(sentence)}</b></div>"

    def _say(self, sentence: str) -> None:
        self._said.append(sentence)
        self.sentences.value = "".join(f"<div style='font-size:16px'>{html.escape(each)}</div>" for each in self._said)

    def _draw(self) -> None:
        self.picture.value = figures.picture(self.histories, self.undisturbed)._repr_html_()
        self.table.value = Table(figures.times(self.histories), figures.HEADERS)._repr_html_()


def fault_lab(ranks: int = 4) -> None:
    """Show the fault lab: choose a recovery, start, and kill."""
    show_widget(FaultLab(ranks).box, "A choice of recovery, Start, a button that kills each rank, and the curves.")
