"""Lesson 02: checks that ranks count every point exactly once."""

import math
from contextlib import contextmanager

from dtlib import pi
from dtlib.lab.checks.equality import rounded
from dtlib.lab.checks.exercise import Exercise, Wrong, rows

# Points per rank: a rank's own count fits into int16, but no sum of two counts does.
MANY = 30_000
SLICE_HINT = "pi.slice_of(points, comm.rank, comm.size) is this rank's first point, and its last point + 1."


def observe_count(count_my_points, comm):
    """Return, for two numbers of points, the ranges that this rank counted, and the returned count."""
    return [_observed(count_my_points, points, comm) for points in (1000 * comm.size, 50_000 * comm.size + 1)]


def judge_count(observations) -> None:
    """Check that the ranks count the points 0 to ``points - 1`` once, and return their own counts."""
    for points, ranges, counts in _cases(observations):
        _check_ranges(ranges, points)
        for rank, count in enumerate(counts):
            if not isinstance(count, int):
                expected = "this rank's count, a whole number"
                raise Wrong("type", rank, expected, f"{count}", "Return what the kernel returns.",
                            "return pi.count_compiled(start, stop): a count, not an estimate and not a tuple.")
        expected = pi.count_numpy(0, points)
        if sum(counts) != expected:
            start, stop = pi.slice_of(points, 0, len(counts))
            raise Wrong("other-count", 0, f"{expected} of {points} points inside, over all ranks", f"{sum(counts)}",
                        "Return only the count of this rank: the check adds the counts.",
                        "Count with pi.count_compiled(start, stop), without another seed, and return its result.",
                        f"Of {points} points rank 0 counts the points from {start} to {stop - 1}.")


def observe_estimate(estimate_pi, comm):
    """Return, for several numbers of points, the ranges that this rank counted, and the returned estimate.

    The numbers include one with a remainder, numbers below the number of ranks, and a large one.
    """
    sizes = (1000 * comm.size, 1000 * comm.size + comm.size - 1, max(1, comm.size - 1), 1, MANY * comm.size)
    return [_observed(estimate_pi, points, comm) for points in sizes]


def judge_estimate(observations) -> None:
    """Check that every rank returns the same pi, from all points, each counted once."""
    for points, ranges, estimates in _cases(observations):
        size = len(estimates)
        expected = pi.Estimate(points, pi.count_numpy(0, points)).pi
        expected_text = f"{expected:.8f} from {points} points, on every rank"
        for rank, got in enumerate(estimates):
            if not isinstance(got, (int, float)):
                raise Wrong(
                    "type", rank, "a number: " + expected_text, f"{got}",
                    "Return the estimate itself, on every rank." if got == "None" else "Return only the number.",
                    "return 4 * inside.item() / points, as the last line, outside of any if.")
        off = [rank for rank, got in enumerate(estimates) if not abs(got - expected) <= 1e-6]  # also true for NaN
        rank = off[0] if off else None
        got = estimates[off[0]] if off else expected
        wrong = rows(rank, expected_text)
        wrong("only-root", off and 0 not in off, f"{got}",
              "Rank 0 is right and another rank is wrong. Which operation gives the result to all ranks?",
              "all_reduce gives the result to every rank, reduce only to its root.")
        _check_ranges(ranges, points)
        if not off:
            continue
        wrong("narrow-type", points == MANY * size, f"{got}, and with fewer points it was right",
              "Which is the largest number that the tensor's type can store? These counts need more than 16 bits.",
              "Omit dtype: a tensor of whole numbers is int64.")
        wrong("summed-estimates", isinstance(got, float) and size > 1 and abs(got - size * expected) < 0.1,
              f"{got:.8f}, about {size} times too much",
              "Is all_reduce called twice? Are estimates added? Is the sum divided by the points of one rank?",
              "Add the counts, then compute pi once.")
        inside = pi.count_numpy(0, points)
        mine = pi.count_numpy(*pi.slice_of(points, rank, size))
        wrong("averaged-estimates", abs(got - _mean_of_estimates(points, size)) < 1e-9,
              f"{got}, the mean of the estimates of all ranks",
              "Ranks with fewer points must count less. What should all_reduce add: estimates or counts?",
              "Add the counts, then compute pi once.")
        # Wrong value -> hint.
        hints = {
            inside / points: "This is the fraction of points inside. How does pi follow from this fraction?",
            inside: "This is the count. How does pi follow from the count and the number of points?",
            4 * mine / points: "This is the count of this rank only. Which operation adds the counts?",
            _own_estimate(points, rank, size): "This rank's own estimate. Which operation adds the counts?",
            expected / size: "`points` are the points of all ranks. Why do you divide by the ranks, too?",
            math.pi: "This is the exact value of pi. Return the estimate from these points.",
        }
        hint = next((said for value, said in hints.items() if abs(got - value) < 1e-6), None)
        if hint is None and rounded(got, expected):
            hint = "Is the result rounded, or is its type too small? Return all digits of 4 * inside / points."
        if hint is None:
            hint = "Print the points, the sum and the divisor on every rank. Which one is wrong?"
        wrong("other-estimate", True, f"{got}", hint,
              "inside = torch.tensor(pi.count_compiled(start, stop)), all_reduce it, "
              "return 4 * inside.item() / points.")


def _own_estimate(points: int, rank: int, size: int) -> float:
    start, stop = pi.slice_of(points, rank, size)
    return 4 * pi.count_numpy(start, stop) / max(1, stop - start)


def _mean_of_estimates(points: int, size: int) -> float:
    return sum(_own_estimate(points, rank, size) for rank in range(size)) / size


def _observed(function, points, comm):
    with recorded_ranges(getattr(function, "__globals__", {})) as ranges:
        try:
            got = function(points, comm)
        except Exception as error:
            error.add_note(f"in {function.__name__}({points}, comm) on {comm.size} ranks")
            raise
    if isinstance(got, (int, float)):
        return points, ranges, got
    try:
        return points, ranges, got.item()  # a tensor or an array of one element
    except (AttributeError, ValueError, RuntimeError):
        return points, ranges, f"{got!r:.80}"


def _cases(observations):
    """Yield for each case the number of points, and by rank the ranges and the results."""
    for case in zip(*observations, strict=True):
        points, ranges, results = zip(*case, strict=True)
        yield points[0], ranges, results


@contextmanager
def recorded_ranges(names: dict):
    """Return a context whose list collects the ranges of points that this rank counts, with any kernel.

    ``names`` is the namespace of the answer, which may have imported a kernel under its own name.
    """
    ranges = []
    originals = {pi.count_loop, pi.count_numpy, pi.count_compiled, pi.count_gpu}

    def recording(kernel):
        def count(start, stop, seed=0, **named):
            ranges.append((start, stop, seed))
            return kernel(start, stop, seed, **named)

        return count

    # Replace the kernels under all names by which an answer may call them.
    places = [
        (space, name, thing)
        for space in (vars(pi), pi.KERNELS, names)
        for name, thing in space.items()
        if callable(thing) and any(thing is kernel for kernel in originals)
    ]
    try:
        for space, name, kernel in places:
            space[name] = recording(kernel)
        yield ranges
    finally:
        for space, name, kernel in places:
            space[name] = kernel


def _check_ranges(ranges_by_rank, points: int) -> None:
    """Check that every point is counted once. Only calls of dtlib.pi's kernels are visible to this check."""
    ranges = [tuple(ranges) for ranges in ranges_by_rank]
    if not any(ranges):
        return
    size = len(ranges)
    for rank, mine in enumerate(ranges):
        if seeds := {seed for _, _, seed in mine if seed != 0}:
            raise Wrong("seed", rank, "the points of seed 0", f"points of seed {min(seeds)}",
                        "Another seed gives other points. How can all ranks use one seed, but different points?",
                        SLICE_HINT)
    counted = sum(stop - start for mine in ranges for start, stop, _ in mine)
    expected = f"the points 0 to {points - 1}, each counted by one rank"
    wrong = rows(1, expected)
    wrong("all-on-every-rank", size > 1 and len(set(ranges)) == 1 and counted == size * points,
          f"every rank counted all {points} points",
          "The value may be right, but every rank did the whole work. How do you divide it?", SLICE_HINT)
    wrong("same-points", size > 1 and len(set(ranges)) == 1, f"every rank counted the points {_text(ranges[0])}",
          "All ranks count the same points. Which values must differ between ranks?", SLICE_HINT)
    # In the order of their starts, ranges must join without gap and overlap.
    position = 0
    pieces = sorted((start, stop, rank) for rank, mine in enumerate(ranges) for start, stop, _ in mine if start < stop)
    for start, stop, rank in pieces:
        if start != position:
            twice = start < position
            got = f"{start} to {position - 1} counted twice" if twice else f"{position} to {start - 1} not counted"
            raise Wrong("overlap" if twice else "gap", rank, expected, got,
                        "Does each rank start directly after the last point of the rank before it?", SLICE_HINT)
        position = stop
    idle = [rank for rank, mine in enumerate(ranges) if not any(start < stop for start, stop, _ in mine)]
    if idle and points >= size and len(idle) < size:
        raise Wrong("idle", idle[0], "a slice of the points for every rank", "no point",
                    "This rank counts nothing while others work. How do you divide the points?", SLICE_HINT)
    if not pieces:
        raise Wrong("nothing", 0, expected, "no rank counted a point",
                    "count_compiled(start, stop) counts start to stop - 1. Is start the smaller one?", SLICE_HINT)
    last = pieces[-1][2]
    wrong = rows(last, expected)
    wrong("fewer-points-than-ranks", position > points and points < size,
          f"{points} point{'s' * (points > 1)} in all, and rank {last} counted point {position - 1}",
          "There are fewer points than ranks. Which ranks should count a point?",
          "Some ranks have no point to count. On these ranks start and stop are equal.", SLICE_HINT)
    wrong("remainder", position > points, f"rank {last} also counted point {position - 1}",
          f"There are {points} points. Where must the last rank stop?", SLICE_HINT)
    wrong("gap", points - position >= size, f"{position} to {points - 1} counted by no rank",
          "Which are the first and the last point of each rank? Both arguments are positions, not lengths.", SLICE_HINT)
    wrong("remainder", position != points, f"the last rank stopped at point {position - 1}",
          f"{points} points do not divide evenly by {size} ranks. Which rank counts the remaining points?", SLICE_HINT)


def _text(ranges) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop, _ in ranges)


EXERCISES = {
    "pi-streams": Exercise("count_my_points", observe_count, judge_count, any_size=True),
    "pi-on-ranks": Exercise("estimate_pi", observe_estimate, judge_estimate, any_size=True),
}
