"""``dtlib tour``: solve one exercise of each of lessons 00 to 08 on MPI engines and judge it, without a browser."""

import shutil
import time
from pathlib import Path

from dtlib.files import private_temp_folder
from dtlib.lab import course
from dtlib.lab.checks.judging import judge_on_this_rank
from dtlib.lab.checks.predictions import without_magic
from dtlib.lab.checks.solutions import cells_of
from dtlib.lab.course import LEFT_BEHIND, PROFILE
from dtlib.lab.engines import engine_processes, engine_set
from dtlib.lab.engines.workshop import Record

STOPS = {
    "00 Start here": "first-sum", "02 MPI and pi": "pi-on-ranks", "03 Collectives": "ring-build",
    "04 Data parallelism": "buckets-build", "05 Large batches": "warmup-fix", "06 ZeRO": "zero2-fix",
    "07 Pipelines": "1f1b-build", "08 Tensor and hybrid parallelism": "mlp-build",
}  # fmt: skip
WIDTHS = [32, 16, 30, 8, 7]  # of the table's columns, in characters


def tour(ranks: int, profile: str | None = None) -> int:
    """Run all exercises on ``ranks`` engines and print a table of verdicts; return 0 if all have passed, otherwise 1.

    Without a ``profile`` it uses a copy of the course's profile, so engines of open notebooks are left alone.
    """
    from tabulate import tabulate

    with private_temp_folder("tour") as folder:
        if profile is None:
            profile = folder / PROFILE.name
            left_behind = shutil.ignore_patterns(*LEFT_BEHIND)
            shutil.copytree(course.SOURCE / PROFILE, profile, ignore=left_behind)
        try:
            engines = engine_set.engines(ranks, profile=profile)
            rows = [_row(engines, *stop) for stop in STOPS.items()]
        finally:
            if Path(profile, "ipcluster_config.py").is_file():  # otherwise no engine has started there
                engine_processes.end(Record(Path(profile)))
    print()
    head = ("lesson", "exercise", f"on {ranks} MPI engines", "passed", "seconds")
    print(tabulate(rows, head, maxcolwidths=WIDTHS, maxheadercolwidths=WIDTHS))
    return 0 if all(row[3] == "yes" for row in rows) else 1


def _row(engines, lesson: str, exercise: str) -> tuple[str, ...]:
    imports, answer = cells_of(exercise)
    began = time.perf_counter()
    says = set(engines.view.apply_sync(solved_and_judged, exercise, [imports, *answer]))
    seconds = time.perf_counter() - began
    passed = all(right for right, _ in says)
    return lesson, exercise, "; ".join(words for _, words in says), "yes" if passed else "NO", f"{seconds:.2f}"


def solved_and_judged(exercise: str, cells: list[str]) -> tuple[bool, str]:
    """Run the cells that solve an exercise, and judge the answer together with the other ranks.

    Returns whether it passed, and the verdict's text. Called on each rank.
    """
    names: dict = {"__name__": "__main__"}
    for cell in cells:
        exec(without_magic(cell), names)
    verdict = judge_on_this_rank(exercise, names)
    return verdict.passed, verdict.score or verdict.mistake or "passed"
