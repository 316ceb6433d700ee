"""``dtlib tour``: the core of every lesson on MPI engines, without a browser, in one table."""

import shutil
import tempfile
import time
from pathlib import Path

from dtlib import pi
from dtlib.lab import engine_set, workshop

POINTS = 10**7


def tour(ranks: int, profile=None) -> int:
    """Run every stop on ``ranks`` engines and print a table of results; returns 0 if all are as expected, else 1.

    Without a ``profile`` it works on a copy of the workshop's: the engines of open notebooks are left alone.
    """
    from tabulate import tabulate

    with tempfile.TemporaryDirectory() as folder:
        if profile is None:
            profile = Path(folder) / workshop.PROFILE.name
            left_behind = shutil.ignore_patterns(*workshop.LEFT_BEHIND)
            shutil.copytree(workshop.folder() / workshop.PROFILE, profile, ignore=left_behind)
        try:
            engines = engine_set.engines(ranks, profile=profile)
            rows = [_row(engines, *stop) for stop in _stops(Path(folder), ranks)]
        finally:
            engine_set.end(workshop.Record(Path(profile)))
    print()
    print(tabulate(rows, ("lesson", f"on {ranks} MPI engines", "result", "expected", "as expected", "seconds")))
    return 0 if all(row[4] == "yes" for row in rows) else 1


def _stops(folder: Path, ranks: int):
    """The stops: lesson, what happens, the function that runs on every rank, its arguments, what every rank returns."""
    inside = pi.count_compiled(0, POINTS)
    yield "00 Start here", "all_reduce of the ranks", sum_of_ranks, (), sum(range(ranks))
    yield "02 MPI and pi", f"count {POINTS:,} points", count_points, (POINTS,), inside
    file = str(pi.write_points(folder / "points.bin", 10**5))
    yield "02 MPI and pi", "count a file of 100,000 points", count_points_of_file, (file,), pi.count_compiled(0, 10**5)


def _row(engines, lesson, what, function, arguments, expected):
    began = time.perf_counter()
    results = engines.view.apply_sync(function, *arguments)
    seconds = time.perf_counter() - began
    right = "yes" if set(results) == {expected} else "NO"
    shown = results[0] if len(set(results)) == 1 else results
    return lesson, what, f"{shown}", f"{expected}", right, f"{seconds:.2f}"


def sum_of_ranks() -> int:
    import torch

    from dtlib.world import init

    world = init()
    return int(world.comm.all_reduce(torch.tensor(world.rank)))


def count_points(points: int) -> int:
    from dtlib.world import init

    return pi.count_on_ranks(points, init().comm)


def count_points_of_file(file: str) -> int:
    from dtlib.world import init

    return pi.count_file(file, init().comm).inside
