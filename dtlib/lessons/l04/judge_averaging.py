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
        raise Wrong("other-root", 0, "rank 0's values on every rank", f"the values of rank {of_ranks.index(begins)}",
                    "All ranks have the same values. From which rank?",
                    "comm.broadcast(tensor), or root=0: the values of rank 0.")
    for rank, case in enumerate(cases):
        for name, expected in truth.items():
            if case["begins"][name] == expected:
                continue
            wrong = rows(rank, f"{name} of the {case['model']} net: rank 0's values on every rank")
            wrong("buffers-not-broadcast", name in ("shift",
                                                    "scale"), "other values: a buffer that differs on this rank",
                  "The output also depends on buffers. Are they equal on all ranks? state_dict() omits some.",
                  "Broadcast module.buffers() as well as module.parameters(), from rank 0.")
            wrong("frozen-not-broadcast", name.startswith("frozen"), "this rank's own values, in a frozen layer",
                  "The forward pass also uses frozen layers. Are their values equal on all ranks?",
                  "Broadcast all of module.parameters(), also parameters with requires_grad=False.")
            wrong("not-broadcast", True, "other values",
                  "Ranks start with different weights here. Do equal gradients make them equal?",
                  "First of all: comm.broadcast(tensor) for each parameter and buffer.")


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
    wrong("parameter-reduced", moved, "unchanged parameters, and averaged gradients", "parameters were averaged",
          "What do you average, the parameters or their gradients? The loss may fall in both cases.",
          "Pass parameter.grad to comm.all_reduce, not parameter or parameter.data.")
    unused = [n for n in off[rank] if expected[n] is None]
    if unused:
        wrong("unused", True, f"{unused[0]}.grad is None, as in one process", "a gradient",
              "With a gradient of zeros, momentum and weight decay still change a parameter. How can it be skipped?",
              "Omit parameters whose grad is None.")
    if any(gradients[n] is None for n in off[rank]):
        name = next(n for n in off[rank] if gradients[n] is None)
        wrong("gradient-lost", True, f"{name}.grad", "None", "Write the average back to parameter.grad.",
              "Do not set parameter.grad to None after backward(): copy the average into it.")
    _judge_roots(cases, off, where, expected)
    # If all gradients on all ranks are wrong by one factor, the factor says which mistake it is.
    everywhere = [(r, n) for r in range(size) for n in expected if expected[n] is not None]
    ratios = {(r, n): _ratio(cases[r]["gradients"][n], expected[n]) for r, n in everywhere}
    same = set(ratios.values())
    ratio = same.pop() if len(same) == 1 else None
    wrong("not-waited", any(case["not waited for"] for case in cases), f"{where}: the sum, after work.wait()",
          "something else, and an all_reduce with async_op=True without a wait()",
          "The tensor has the sum only after work.wait(). When do you copy the sum back?",
          "work = dist.all_reduce(..., async_op=True). Call work.wait() before you use the result.")
    wrong("rounded",
          ratio is None and all(_close(case["gradients"][n], expected[n], 1e-2) for case in cases for n in expected),
          f"{where} in float64, the type of the gradients", "nearly the right values, but rounded",
          "Which dtype does the flat tensor have?",
          "torch.cat keeps the type of the gradients; torch.empty or torch.zeros need dtype=gradient.dtype.")
    wrong("second-step", kind == "again", f"{where} in the second step", "something else, after a correct first step",
          "Which data of the first step do you still use? After zero_grad() parameter.grad is a new tensor, or None.",
          "Read parameter.grad again in each step.")
    if all(_close(cases[r]["gradients"][n], cases[r]["local"][n]) for r, n in everywhere):
        got = f"each rank's own gradient, although {calls} operations ran" if calls else "each rank's own gradient"
        wrong("not-averaged", True, f"{where}: the same on all ranks", got,
              "Do you wait for the average, and write it back?" if calls else "Which operation averages?",
              "all_reduce works in place. If you reduce a copy, as of torch.cat, copy it back: grad.copy_(piece).")
    wrong("left-out", all(_close(cases[r]["gradients"][n], cases[r]["local"][n]) for r in off for n in off[r]),
          f"{where}: the same on all ranks", f"the gradient of this rank only, also for {', '.join(off[rank])}",
          "Other gradients are averaged. Does your code skip the last bucket, large gradients, or biases?",
          "Each gradient needs a bucket or a hook. Reduce each bucket, also the last one, which may not be full.")
    tied = [(r, n) for r, n in everywhere if n == "inside.weight"]
    if model == "awkward" and all(ratios[pair] == 1 for pair in everywhere if pair not in tied):
        wrong("tied-twice", True, f"{where}, once", _times(ratios[tied[0]]), *TIED)
    if kind == "regrouped":
        counts = ", ".join(f"{case['samples']}" for case in cases)
        wrong("weight-remembered", True, f"{where}: the mean over all samples (the ranks have {counts} this time)",
              "other weights, after a correct uneven batch",
              "The next batch may have other sizes. How many samples does each rank have now?",
              "In every call of average_gradients, all_reduce the samples; do not store the total or the weight.")
    if kind == "uneven":
        _judge_weights(cases, rank, where, ratio, everywhere)
    weights = ("The weights of all ranks should add up to 1. Print the samples and the divisor on every rank. Do they?",
               "The weight of a rank is samples / total. total is the *sum* of the samples of all ranks.")
    if ratio in (size, size * EVEN):
        hints = weights
        if cases[0]["hooks"]:
            hints = ("This is the sum, like a larger learning rate. Where do you compute the mean, and write it back?",
                     'Average: op=dist.ReduceOp.AVG, or parameter.grad /= comm.size, in place.')
        wrong("not-divided", True, f"{where}: the mean over all samples", _times(ratio), *hints)
    wrong("divided-twice", ratio in (1 / size, 1 / size / EVEN, 1 / size**2), f"{where}: the mean over all samples",
          _times(ratio), *(
              ("op=dist.ReduceOp.AVG divides already. Which line divides again?", "Use AVG, or a sum / size.")
              if cases[0]["hooks"] else ("You weight or divide twice. Before the sum and after it?", weights[1])))
    for choose in (max, min):
        chosen = {n: [choose(column) for column in zip(*(case["local"][n] for case in cases), strict=True)]
                  for _, n in everywhere}
        wrong("other-op", all(_close(cases[r]["gradients"][n], chosen[n]) for r, n in everywhere),
              f"{where}: the mean over all ranks", f"the {choose.__name__} over ranks",
              "min and max select the number of one rank. Which op uses the numbers of all ranks?",
              'dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=comm.group)')
    if ratio is not None and ratio != 1:
        hints = ("The gradient has a wrong scale. Which line multiplies or divides?",
                 "op=dist.ReduceOp.AVG divides by the number of ranks. Do not divide again.")
        wrong("scaled", True, f"{where}: the mean over all samples", _times(ratio),
              *(hints if cases[0]["hooks"] else weights))
    wrong("other-values", cases[0]["hooks"], f"{where}: the gradient of the joined batch", "something else",
          "Which operation combines the gradients of all ranks? Does every trained parameter have a hook?",
          'In the hook of each parameter: dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=comm.group)')
    wrong("other-values", True, f"{where}: the gradient of the joined batch", "something else",
          "Do you copy the pieces back to the parameters that they came from, in the same order on all ranks?",
          "Store the bucket's list of gradients; split the flat tensor by their numel(), and copy_ each piece.")


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
          f"only rank {root} has the average",
          "The average is computed, but only one rank gets it. Which operation gives it to all ranks?",
          "reduce gives the result only to its root, all_reduce gives it to every rank.")
    trained = [name for name in expected if expected[name] is not None]
    for root in range(size):
        ratios = {_ratio(case["gradients"][n], cases[root]["local"][n]) for case in cases for n in trained}
        wrong("one-rank's", size > 1 and len(ratios) == 1 and None not in ratios,
              f"{where}: the mean over all ranks' samples",
              f"on every rank the gradient from the samples of rank {root} only",
              "All ranks now have the same gradient. Which samples does it come from?",
              "broadcast copies the tensor of one rank; all_reduce combines the tensors of all ranks.")


def _judge_weights(cases, rank, where, ratio, everywhere) -> None:
    size = len(cases)
    mean = {
        n: [sum(column) / size for column in zip(*(case["local"][n] for case in cases), strict=True)]
        for n in {n for _, n in everywhere}
    }
    counts = ", ".join(f"{case['samples']}" for case in cases)
    wrong = rows(rank, f"{where}: the mean over all samples (the ranks have {counts})")
    wrong("unweighted", all(_close(cases[r]["gradients"][n], mean[n]) for r, n in everywhere),
          "the mean over ranks: each rank has the same weight, with few or many samples",
          "One rank has one sample, another has five. Should their gradients have the same weight?",
          "Multiply gradients by samples / total, and sum them over ranks. An all_reduce gives the total of samples.")
    alike = {_ratio(cases[r]["gradients"][n], mean[n]) for r, n in everywhere}
    wrong("weights", True, "other weights" if ratio is None else _times(ratio),
          "Every rank has the same weight. Whose `samples` does it use?" if None not in alike and len(alike) == 1 else
          "Even batches are right, uneven batches are wrong. Do the weights of all ranks add up to 1?",
          "Weight this rank's gradients by samples / total, then add. total is the all_reduce of samples.")


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
