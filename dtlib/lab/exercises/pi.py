"""Lesson 02: every point is counted once, by one rank."""

from contextlib import contextmanager

from dtlib import pi
from dtlib.lab.checks import Wrong

SHARE_HINT = "pi.part(points, comm.rank, comm.size) gives the first point of this rank and one past its last."


def observe_count(count_my_points, comm):
    """For several numbers of points: the ranges that this rank counted, and what it returned."""
    return [_observed(count_my_points, points, comm) for points in (1000 * comm.size, 50_000 * comm.size + 1)]


def judge_count(observations) -> None:
    """Together the ranks count the points 0 to ``points - 1``, each once; the function returns this rank's count."""
    for points, ranges, counts in _cases(observations):
        _check_ranges(ranges, points)
        for rank, count in enumerate(counts):
            if not isinstance(count, int):
                expected = "this rank's count, a whole number"
                raise Wrong("type", rank, expected, f"{count}", "Return what the kernel returns.")
        expected = pi.count_numpy(0, points)
        if sum(counts) != expected:
            start, stop = pi.part(points, 0, len(counts))
            raise Wrong(
                "other-count", 0, f"{expected} of {points} points inside, over all ranks", f"{sum(counts)}",
                "Count with pi.count_compiled(start, stop), without another seed, and return what it returns.",
                f"Of {points} points rank 0 counts those from {start} to {stop - 1}.",
            )  # fmt: skip


def observe_estimate(estimate_pi, comm):
    """The same for estimates, with and without a remainder, and with fewer points than ranks."""
    sizes = (1000 * comm.size, 1000 * comm.size + comm.size - 1, max(1, comm.size - 1))
    return [_observed(estimate_pi, points, comm) for points in sizes]


def judge_estimate(observations) -> None:
    """Every rank returns the same pi, from all points, each counted once."""
    for points, ranges, estimates in _cases(observations):
        size = len(estimates)
        expected = pi.Estimate(points, pi.count_numpy(0, points)).pi
        expected_text = f"{expected:.8f} from {points} points, on every rank"
        wrong = [rank for rank, came in enumerate(estimates) if came != expected]
        if wrong and 0 not in wrong:
            raise Wrong(
                "only-root", wrong[0], expected_text, f"{estimates[wrong[0]]}",
                "Rank 0 is right and another rank is not: which verb gives the result to all?",
                "all_reduce gives the result to every rank, reduce to its root alone.",
            )  # fmt: skip
        _check_ranges(ranges, points)
        if not wrong:
            continue
        came = estimates[wrong[0]]
        if isinstance(came, float) and size > 1 and abs(came - size * expected) < 0.1:
            raise Wrong(
                "summed-estimates", wrong[0], expected_text, f"{came:.8f}, about {size} times too much",
                "Sum the counts, then compute pi once.",
            )  # fmt: skip
        raise Wrong(
            "other-estimate", wrong[0], expected_text, f"{came}",
            "Reduce the counts, not the estimates: parts of different length must not have equal weight.",
            "inside = torch.tensor([pi.count_compiled(start, stop)]), then all_reduce, then 4 * inside / points.",
        )  # fmt: skip


def _observed(function, points, comm):
    with recorded_ranges() as ranges:
        came = function(points, comm)
    if isinstance(came, (int, float)):
        return points, ranges, came
    try:
        return points, ranges, came.item()  # a tensor or an array of one element
    except (AttributeError, ValueError, RuntimeError):
        return points, ranges, f"{came!r:.80}"


def _cases(observations):
    """Case by case: the number of points, then the ranges and the results by rank."""
    for case in zip(*observations, strict=True):
        points, ranges, results = zip(*case, strict=True)
        yield points[0], ranges, results


@contextmanager
def recorded_ranges():
    """The ranges of points that this rank counts meanwhile, whichever kernel it calls."""
    ranges = []
    originals = {name: getattr(pi, name) for name in ("count_loop", "count_numpy", "count_compiled", "count_gpu")}

    def recording(kernel):
        def count(start, stop, *arguments, **named):
            ranges.append((start, stop))
            return kernel(start, stop, *arguments, **named)

        return count

    try:
        for name, kernel in originals.items():
            setattr(pi, name, recording(kernel))
        yield ranges
    finally:
        for name, kernel in originals.items():
            setattr(pi, name, kernel)


def _check_ranges(ranges_by_rank, points: int) -> None:
    """Every point once. Says nothing where the answer counts without the kernels of dtlib.pi."""
    ranges = [tuple(ranges) for ranges in ranges_by_rank]
    if not any(ranges):
        return
    size = len(ranges)
    counted = sum(stop - start for mine in ranges for start, stop in mine)
    expected = f"the points 0 to {points - 1}, each counted by one rank"
    if size > 1 and len(set(ranges)) == 1 and counted == size * points:
        raise Wrong(
            "all-on-every-rank", 1, expected, f"every rank counted all {points} points",
            "The value may be right, but every rank did the whole work: no speed-up.", SHARE_HINT,
        )  # fmt: skip
    if size > 1 and len(set(ranges)) == 1:
        raise Wrong(
            "same-points", 1, expected, f"every rank counted the points {_text(ranges[0])}",
            "All ranks draw the same points: what differs between them?", SHARE_HINT,
        )  # fmt: skip
    position = 0
    pieces = sorted((start, stop, rank) for rank, mine in enumerate(ranges) for start, stop in mine if start < stop)
    for start, stop, rank in pieces:
        if start != position:
            twice = start < position
            came = f"{start} to {position - 1} counted twice" if twice else f"{position} to {start - 1} by nobody"
            raise Wrong(
                "overlap" if twice else "gap", rank, expected, came,
                "Where one rank stops the next must start.", SHARE_HINT,
            )  # fmt: skip
        position = stop
    if position != points:
        raise Wrong(
            "remainder", pieces[-1][2], expected, f"the last rank stopped at point {position - 1}",
            f"{points} points do not divide evenly by {size} ranks: who counts the rest?", SHARE_HINT,
        )  # fmt: skip


def _text(ranges) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop in ranges)
