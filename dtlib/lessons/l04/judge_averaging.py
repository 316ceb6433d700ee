"""Lesson 04: check of averaged gradients, by values against one process and by the reduced bytes."""

from dtlib.lab.checks.equality import as_tensor, factors
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l04 import observe_averaging as observed
from dtlib.lessons.l04.judge_cost import TIED, judge_cost
from dtlib.lessons.l04.observe_averaging import EVEN, GOES_ON, MODELS, joined_gradients, values_of


def judge(observations) -> None:
    """Check initial values, the gradient of the joined batch on every rank, and the cost of the reductions."""
    for cases in zip(*observations, strict=True):
        _judge_beginning(cases)
        _judge_values(cases, moved=any(seen[0]["moved"] for seen in observations))
    for cases in zip(*observations, strict=True):
        judge_cost(cases)


def _judge_beginning(cases) -> None:
    if cases[0]["kind"] in GOES_ON:
        return
    of_ranks = [values_of(MODELS[cases[0]["model"]](seed=rank)) for rank in range(len(cases))]
    truth = of_ranks[0]
    if (begins := cases[0]["begins"]) in of_ranks[1:] and all(case["begins"] == begins for case in cases):
        raise Wrong("other-root", 0, "rank 0's values on every rank", f"those of rank {of_ranks.index(begins)}",
                    "All ranks have the same values now. Whose?", "comm.broadcast(tensor), or root=0: it is rank 0's.")
    for rank, case in enumerate(cases):
        for name, expected in truth.items():
            if case["begins"][name] == expected:
                continue
            what = f"{name}, of the {case['model']} net: rank 0's values on every rank"
            wrong = rows(rank, what)
            wrong("buffers-not-broadcast", name in ("shift", "scale"), "other values: a buffer of this rank's own",
                  "The output depends on more than parameters, and a buffer need not be in the state_dict().",
                  "Broadcast module.buffers() as well as module.parameters(), from rank 0.")
            wrong("frozen-not-broadcast", name.startswith("frozen"),
                  "this rank's own values, in a layer that is frozen",
                  "A layer that is not trained is used all the same.",
                  "Broadcast all of module.parameters(), whether they require a gradient or not.")
            wrong("not-broadcast", True, "other values",
                  "Ranks begin with different weights here. With the same gradients they stay different.",
                  "Before anything else: comm.broadcast(tensor) for each parameter and buffer.")


def _judge_values(cases, moved: bool) -> None:
    size, model, kind = len(cases), cases[0]["model"], cases[0]["kind"]
    expected = joined_gradients(model, kind, cases)
    off = {}  # rank -> names
    for rank, case in enumerate(cases):
        names = [name for name in expected if not _close(case["gradients"][name], expected[name])]
        if names and not _weights_are_rounded(rank, cases, names):
            off[rank] = names
    if not off and not moved:
        return
    rank = min(off, default=0)
    name = off[rank][0] if off else ""
    gradients = cases[rank]["gradients"]
    where = f"{name}.grad of the {model} net on {size} ranks"
    calls = sum(operation != "broadcast" for operation, *_ in cases[rank]["reduced"])
    wrong = rows(rank)
    wrong("parameter-reduced", moved, "parameters as before, and gradients averaged", "parameters were averaged",
          "Is it the parameter that travels, or its gradient? The loss may go down all the same.",
          "Pass parameter.grad to comm.all_reduce, not parameter or parameter.data.")
    unused = [n for n in off[rank] if expected[n] is None]
    if unused:
        wrong("unused", True, f"{unused[0]}.grad is None, as in one process", "a gradient",
              "An optimizer with momentum or weight decay moves a parameter whose gradient is zero, and skips None.",
              "Leave out parameters whose grad is None.")
    if any(gradients[n] is None for n in off[rank]):
        name = next(n for n in off[rank] if gradients[n] is None)
        wrong("gradient-lost", True, f"{name}.grad", "None", "Write the average back to parameter.grad.",
              "Nothing may set parameter.grad to None after backward(): copy the average into it.")
    _judge_roots(cases, off, where, expected)
    # If all gradients on all ranks are wrong by one factor, the factor says which mistake it is.
    everywhere = [(r, n) for r in range(size) for n in expected if expected[n] is not None]
    ratios = {(r, n): _ratio(cases[r]["gradients"][n], expected[n]) for r, n in everywhere}
    same = set(ratios.values())
    ratio = same.pop() if len(same) == 1 else None
    wrong("not-waited", any(case["not waited for"] for case in cases), f"{where}: the sum, once it is there",
          "something else, and an all_reduce with async_op=True that nobody has waited for",
          "Until work.wait() returns, the tensor does not hold the sum. When is it copied back?",
          "work = dist.all_reduce(..., async_op=True), and work.wait() before its result is used.")
    wrong("rounded",
          ratio is None and all(_close(case["gradients"][n], expected[n], 1e-2) for case in cases for n in expected),
          f"{where} in float64, as the gradients are", "nearly that: it was rounded on its way",
          "In which type does the flat tensor travel?",
          "torch.cat keeps the type of the gradients; torch.empty or torch.zeros need dtype=gradient.dtype.")
    wrong("second-step", kind == "again", f"{where} in the second step",
          "something else, after a first step that was right",
          "What is left over from the first step? After zero_grad() parameter.grad is another tensor, or None.",
          "Look up parameter.grad again in each step.")
    if all(_close(cases[r]["gradients"][n], cases[r]["local"][n]) for r, n in everywhere):
        got = f"each rank's own gradient, although {calls} operations ran" if calls else "each rank's own gradient"
        wrong("not-averaged", True, f"{where}: the same on all ranks", got,
              "Is the average written back to parameter.grad, and is it waited for?" if calls else "Who averages?",
              "all_reduce works in place: on a copy, such as torch.cat makes, copy the pieces back: grad.copy_(piece).")
    wrong("left-out", all(_close(cases[r]["gradients"][n], cases[r]["local"][n]) for r in off for n in off[r]),
          f"{where}: the same on all ranks", f"this rank's own, and so of {', '.join(off[rank])}",
          "Others are averaged. What becomes of these: of the last bucket, of large ones, of biases?",
          "Each gradient belongs to a bucket, or has a hook, and each bucket is reduced: the one left over, too.")
    tied = [(r, n) for r, n in everywhere if n == "inside.weight"]
    if model == "awkward" and all(ratios[pair] == 1 for pair in everywhere if pair not in tied):
        wrong("tied-twice", True, f"{where}, once", _times(ratios[tied[0]]), *TIED)
    if kind == "regrouped":
        counts = ", ".join(f"{case['samples']}" for case in cases)
        wrong("weight-remembered", True, f"{where}: the mean over all samples (the ranks have {counts} this time)",
              "another weighting, after an uneven batch that was right",
              "The next batch may differ from the last one: how many samples has each rank this time?",
              "Ask in every call: all_reduce the samples in average_gradients, and keep neither total nor weight.")
    if kind == "uneven":
        _judge_weights(cases, rank, where, ratio, everywhere)
    weights = (
        "The ranks' weights should sum to 1: print samples, and what it is divided by, on every rank.",
        "A rank's weight is samples / total, where total is the *sum* of all ranks' samples.",
    )
    if ratio in (size, size * EVEN):
        hints = weights
        if cases[0]["hooks"]:
            hints = (
                "A sum over ranks is as a learning rate that grows with their number.",
                'Average: op=dist.ReduceOp.AVG, or divide by comm.size once.',
            )
        wrong("not-divided", True, f"{where}: the mean over all samples", _times(ratio), *hints)
    wrong("divided-twice", ratio in (1 / size, 1 / size / EVEN, 1 / size**2), f"{where}: the mean over all samples",
          _times(ratio), *(
              ("It is divided more than once: op=dist.ReduceOp.AVG divides already.", "That, or a sum divided by size.")
              if cases[0]["hooks"] else ("It is weighted or divided twice: before the sum, and after?", weights[1])))
    for choose in (max, min):
        chosen = {n: [choose(column) for column in zip(*(case["local"][n] for case in cases), strict=True)]
                  for _, n in everywhere}
        wrong("other-op", all(_close(cases[r]["gradients"][n], chosen[n]) for r, n in everywhere),
              f"{where}: the mean over all ranks", f"the {choose.__name__} over ranks",
              "min and max choose a number of one rank. Which op uses those of all?",
              'dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=comm.group)')
    if ratio is not None and ratio != 1:
        hints = (
            "The direction is right and the length is not: what multiplies or divides?",
            'op=dist.ReduceOp.AVG divides by the number of ranks, and nothing else does.',
        )
        wrong("scaled", True, f"{where}: the mean over all samples", _times(ratio),
              *(hints if cases[0]["hooks"] else weights))
    wrong("other-values", cases[0]["hooks"], f"{where}: the gradient of the joined batch", "something else",
          "What combines the gradients of all ranks, and has every parameter that is trained a hook?",
          'In the hook of each parameter: dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=comm.group)')
    wrong("other-values", True, f"{where}: the gradient of the joined batch", "something else",
          "Are the pieces copied back to the parameters that they were copied from, in the same order on all ranks?",
          "Keep the bucket's list of gradients; split the flat tensor by their numel(), and copy_ piece by piece.")


def _weights_are_rounded(rank: int, cases, names) -> bool:
    """Return whether the sum is right except for rounded weights.

    For example ``samples / torch.tensor(total)`` is a float32.
    """
    of_rank, total = [cases[rank]["gradients"], *(case["local"] for case in cases)], sum(c["samples"] for c in cases)
    if any(gradients[name] is None for gradients in of_rank for name in names):
        return False
    flat = [as_tensor([number for name in names for number in gradients[name]]) for gradients in of_rank]
    found = factors(*flat) or [0] * len(cases)
    return all(abs(f * total / case["samples"] - 1) < 1e-6 for f, case in zip(found, cases, strict=True))


def _judge_roots(cases, off, where, expected) -> None:
    """Recognise averages on one rank only, and one rank's gradient on all ranks."""
    size = len(cases)
    wrong = rows(min(off))
    root = next((rank for rank in range(size) if rank not in off), None)
    wrong("only-root", size > 1 and len(off) == size - 1, f"{where}: the same average on all ranks",
          f"rank {root} alone has the average",
          "The average is computed, and one rank gets it. Which operation gives it to all?",
          "reduce gives the result to its root, all_reduce to every rank.")
    trained = [name for name in expected if expected[name] is not None]
    for root in range(size):
        ratios = {_ratio(case["gradients"][n], cases[root]["local"][n]) for case in cases for n in trained}
        wrong("one-rank's", size > 1 and len(ratios) == 1 and None not in ratios,
              f"{where}: the mean over all ranks' samples",
              f"on every rank the gradient of rank {root}'s samples alone",
              "All ranks have the same now. But whose samples are in it?",
              'broadcast copies what one rank has; all_reduce combines what all have.')


def _judge_weights(cases, rank, where, ratio, everywhere) -> None:
    size = len(cases)
    mean = {
        n: [sum(column) / size for column in zip(*(case["local"][n] for case in cases), strict=True)]
        for n in {n for _, n in everywhere}
    }
    counts = ", ".join(f"{case['samples']}" for case in cases)
    expected = f"{where}: the mean over all samples (the ranks have {counts})"
    wrong = rows(rank, expected)
    wrong("unweighted", all(_close(cases[r]["gradients"][n], mean[n]) for r, n in everywhere),
          "the mean over ranks: each counts alike, whatever its number of samples",
          "A rank with one sample and one with five: should their gradients count alike?",
          "Multiply by samples / (all ranks' samples), and sum. Who knows the samples of all? An all_reduce.")
    alike = {_ratio(cases[r]["gradients"][n], mean[n]) for r, n in everywhere}
    wrong("weights", True, "another weighting" if ratio is None else _times(ratio),
          "Every rank has the same weight: whose `samples` are in it?" if None not in alike and len(alike) == 1 else
          "Even batches come out right, uneven ones do not. Do the ranks' weights add up to 1?",
          "This rank's weight is samples / total, where total is the all_reduce of samples; then sum.")


def _close(got, expected, tolerance: float = 1e-9) -> bool:
    if got is None or expected is None:
        return got is expected
    largest = max(abs(value) for value in expected)
    return len(got) == len(expected) and all(
        abs(a - b) <= tolerance * largest + 1e-12 for a, b in zip(got, expected, strict=True)
    )


def _ratio(got, expected):
    """Return ``got / expected`` if it is the same for all elements, rounded; else None."""
    product = sum(a * b for a, b in zip(got, expected, strict=True))
    ratio = product / sum(b * b for b in expected)
    if not _close(got, [ratio * b for b in expected]):
        return None
    for whole in range(1, 200):
        for known in (whole, 1 / whole):
            if abs(ratio / known - 1) < 1e-6:
                return known
    return round(ratio, 9)


def _times(ratio) -> str:
    return "something else" if ratio is None else f"{ratio:.4g} times as much"


EXERCISES = {
    "hook-fix": Exercise("average_with_hooks", observed.observe_hooks, judge, any_size=True),
    "buckets-build": Exercise("MyDataParallel", observed.observe_buckets, judge, any_size=True),
}
