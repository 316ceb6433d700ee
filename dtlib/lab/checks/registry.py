"""Where each exercise is at home: the lesson's judge, imported when the exercise is asked for.

``lab.check("mine.py")`` takes an exercise from a file of an instructor's own, which has it as ``EXERCISE``.

Plausible wrong answers stand in ``tests/wrong_answers``; the tests prove that each is rejected for its own reason.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from runpy import run_path

from dtlib.errors import DtlibError
from dtlib.lab.checks.exercise import Exercise

HOMES = {
    "first-sum": "dtlib.lab.lessons.l00.judge_sum",
    "pi-streams": "dtlib.lab.lessons.l02.judge_pi",
    "pi-on-ranks": "dtlib.lab.lessons.l02.judge_pi",
    "ring-mend": "dtlib.lab.lessons.l03.judge_ring",
    "ring-build": "dtlib.lab.lessons.l03.judge_ring",
    "hangs": "dtlib.lab.lessons.l03.judge_hangs",
    "hook-mend": "dtlib.lab.lessons.l04.judge_averaging",
    "buckets-build": "dtlib.lab.lessons.l04.judge_averaging",
    "byte-golf": "dtlib.lab.lessons.l04.judge_byte_golf",
    "warmup-mend": "dtlib.lab.lessons.l05.judge_rates",
    "scale-the-rate": "dtlib.lab.lessons.l05.judge_rates",
    "zero2-mend": "dtlib.lab.lessons.l06.judge_stage2",
    "sharded-adam": "dtlib.lab.lessons.l06.judge_adam",
    "gather-on-demand": "dtlib.lab.lessons.l06.judge_stage3",
    "fit-it": "dtlib.lab.lessons.l06.judge_stage3",
    "pipeline-mend": "dtlib.lab.lessons.l07.judge_pipelines",
    "gpipe-build": "dtlib.lab.lessons.l07.judge_pipelines",
    "1f1b-build": "dtlib.lab.lessons.l07.judge_pipelines",
    "schedule-puzzle": "dtlib.lab.lessons.l07.judge_puzzle",
    "schedule-puzzle-2": "dtlib.lab.lessons.l07.judge_puzzle",
    "schedule-puzzle-3": "dtlib.lab.lessons.l07.judge_puzzle",
    "schedule-puzzle-4": "dtlib.lab.lessons.l07.judge_puzzle",
    "row-mend": "dtlib.lab.lessons.l08.judge_layers",
    "mlp-build": "dtlib.lab.lessons.l08.judge_layers",
    "step-build": "dtlib.lab.lessons.l08.judge_replicator",
    "shard-mend": "dtlib.lab.lessons.l09.judge_input",
    "twice-mend": "dtlib.lab.lessons.l09.judge_input",
    "format-budget": "dtlib.lab.lessons.l09.judge_formats",
    "resume-build": "dtlib.lab.lessons.l09.judge_resuming",
    "fits-200-mb": "dtlib.lab.lessons.l10.judge_runs",
    "slower-mend": "dtlib.lab.lessons.l10.judge_runs",
    "wrap-a-model": "dtlib.lab.lessons.l10.judge_workload",
    "resume-mend": "dtlib.lab.lessons.l11b.judge_recovery",
    "shrink-build": "dtlib.lab.lessons.l11b.judge_recovery",
    "efficiency-mend": "dtlib.lab.lessons.l11.judge_scaling",
    "step-model-build": "dtlib.lab.lessons.l11.judge_scaling",
}


class Registry(Mapping):
    """Name -> exercise, as the ``EXERCISES`` of its home has it, or a file in the notebook's folder."""

    def __getitem__(self, name: str) -> Exercise:
        if name.endswith(".py"):
            return _of_file(Path(name))
        return import_module(HOMES[name]).EXERCISES[name]

    def __iter__(self) -> Iterator[str]:
        return iter(HOMES)

    def __len__(self) -> int:
        return len(HOMES)


def _of_file(path: Path) -> Exercise:
    """Read anew each time, so that it can be mended while a class works."""
    if not path.is_file():
        raise DtlibError(
            f"There is no file {path.name} in {path.absolute().parent}: put the exercise beside the notebook."
        )
    found = run_path(str(path)).get("EXERCISE")
    if not isinstance(found, Exercise):
        raise DtlibError(f"{path.name} has no exercise: let it end in EXERCISE = Exercise(name, observe, judge).")
    return found


EXERCISES = Registry()
