"""Lesson 12, long sequences: checks of merging two blocks of attention, and of adding a block."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows

QUERIES, KEYS, WIDTH = 3, 4, 2
LARGE = 1e4  # its exponential overflows
# Case -> (factor of the scores, constant added to them).
SCORES = {"ordinary scores": (1, 0), "large scores": (LARGE, 0), "scores far below zero": (1, -10 * LARGE)}
_ONE_AT_LEAST = ("The code works for ordinary scores. Does it use 0, or -1e4, as the smallest possible score?",
                 "Only -inf is below every score: do not limit scores, with clamp() or with a start value.")


def numbers(rank: int, *shape: int, of: int = 0):
    """Return random numbers that depend on the rank and on ``of`` only."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * of + rank), dtype=torch.float64)


def same(got, expected, within: float = 1e-6) -> bool:
    """Return whether two tensors are close; False for NaN. The tolerance allows shares in float32."""
    return got.shape == expected.shape and bool((got - expected).abs().max() < within)


def is_like(thing, *shape: int) -> bool:
    """Return whether ``thing`` is a floating-point tensor of this shape."""
    import torch

    return isinstance(thing, torch.Tensor) and thing.shape == shape and thing.is_floating_point()


def about(thing) -> str:
    """Return a description of a wrong result."""
    return f"a tensor of {tuple(thing.shape)}" if hasattr(thing, "shape") else f"{thing!r:.60}"


# Merging two blocks


def block(rank: int, number: int, size: float, more: float = 0):
    """Return scores and values of a block of keys, for this rank's queries."""
    return numbers(rank, QUERIES, KEYS, of=number) * size + more, numbers(rank, KEYS, WIDTH, of=number + 50)


def looked_at(blocks):
    """Return the average of values, and the log-sum-exp, over the keys of all these blocks."""
    import torch

    scores, values = (torch.cat(each, dim) for each, dim in zip(zip(*blocks, strict=True), (-1, 0), strict=True))
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def nothing():
    """Return output and log-sum-exp of no keys."""
    import torch

    return torch.zeros(QUERIES, WIDTH).double(), torch.full((QUERIES,), -torch.inf).double()


def pairs(rank: int) -> dict:
    """Return the inputs of ``merge`` by case.

    Cases include scores whose exponentials overflow or underflow, and first blocks, merged into nothing.
    """
    found = {what: [looked_at([block(rank, number, *scores)]) for number in (1, 2)] for what, scores in SCORES.items()}
    first = {"the first block": "ordinary scores", "the first block, far below zero": "scores far below zero"}
    return found | {what: [nothing(), found[scores][1]] for what, scores in first.items()}


def observe_merge(merge, comm):
    """Return the result of ``merge`` for each case, or an error."""
    seen = {}
    for what, (one, other) in pairs(comm.rank).items():
        got = merge(*(tensor.clone() for tensor in (*one, *other)))
        if not (isinstance(got, tuple) and len(got) == 2):
            return {"error": f"{what}: {about(got)}"}
        if not (is_like(got[0], QUERIES, WIDTH) and is_like(got[1], QUERIES)):
            return {"error": f"{what}: {about(got[0])} and {about(got[1])}"}
        seen[what] = [tensor.detach().clone().double() for tensor in got]
    return seen


_WEIGHT = "Each block is an average. What is its share of the sum of all exponentials?"
_MERGES = {
    "old-not-rescaled": (lambda a, b, w, v: a + v * b,
                         "The new block's share is right. And the old share?",
                         "(lse - total).exp() is the old share: multiply out by it."),
    "new-not-rescaled": (lambda a, b, w, v: w * a + b,
                         "The old share is right. And the new block's share?",
                         "(block_lse - total).exp() is the share of the new block."),
    "swapped": (lambda a, b, w, v: v * a + w * b, "Which of the two blocks has the larger share?", _WEIGHT),
    "added": (lambda a, b, w, v: a + b, _WEIGHT, "If two blocks have equal sums, each has a share of a half."),
    "left-out": (lambda a, b, w, v: a, "This is the result without the new block. Where do you add it?", _WEIGHT),
    "mean": (lambda a, b, w, v: (a + b) / 2, _WEIGHT, "A block of large scores has a larger share."),
}


def judge_merge(observations) -> None:
    """Check the merged average and log-sum-exp in each case."""
    import torch

    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong(
                "type", rank, f"out of {(QUERIES, WIDTH)}, and lse of {(QUERIES,)}", seen["error"],
                "Return both, out and lse. Shape (queries,) times (queries, width) needs share[:, None]")
        for what, ((a, lse), (b, block_lse)) in pairs(rank).items():
            (out, total), right = seen[what], torch.logaddexp(lse, block_lse)
            w, v = ((each - right).exp()[:, None] for each in (lse, block_lse))
            wrong = rows(rank, f"{what}: the average over the keys of both")
            if not (out.isfinite().all() and total.isfinite().all()):
                first = what == "the first block"
                wrong("no-number-at-first" if first else "overflow", True, "no number",
                      "Before the first block lse is -inf. What is -inf - (-inf)?" if first
                      else f"What are exp({LARGE:g}), exp(-{LARGE:g}) and 0 / 0? Each query needs its largest score.",
                      "torch.logaddexp(lse, block_lse) handles all of these cases.")
            wrong("least-score", "far" in what and not (same(out, w * a + v * b) and same(total, right)),
                  "something else", *_ONE_AT_LEAST)
            if not same(out, w * a + v * b):
                for mistake, (merged, *hints) in _MERGES.items():
                    wrong(mistake, same(out, merged(a, b, w, v)), "another average", *hints)
                larger = torch.maximum(lse, block_lse)
                wrong("largest",
                      same(out, sum((each - larger).exp()[:, None] * x for each, x in ((lse, a), (block_lse, b)))),
                      "shares with a sum above one",
                      "The sum of two exponentials is larger than each of them.", "torch.logaddexp, not maximum")
                wrong("other-average", True, "another number", _WEIGHT, "exp(lse - total), for each block.")
            if not same(total, right):
                wrong("rounded", torch.allclose(total, right, 1e-5), "nearly the right values, but rounded",
                      "In which type do you compute the log-sum-exp?", "Use the type of lse: no .float().")
                said = {
                    "lse-not-carried": (lambda old, new: old, "the log-sum-exp of the old blocks only"),
                    "other-lse": (lambda old, new: new, "the log-sum-exp of the new block only"),
                    "largest-lse": (torch.maximum, "the larger of the two"),
                }
                # A mistake is named only if it explains the results of all ranks and cases.
                everywhere = [(each[w][1], a, b) for r, each in enumerate(observations)
                              for w, ((_, a), (_, b)) in pairs(r).items()]
                found = [m for m, (of, _) in said.items() if all(torch.allclose(c, of(a, b)) for c, a, b in everywhere)]
                mistake = found[0] if found else "other-lse"
                told = said[mistake][1] if found else "another number"
                raise Wrong(mistake, rank, f"{what}: log-sum-exp of the scores of both", told,
                            "The next block will be merged with this result. Which two values does this merge need?",
                            "return out, torch.logaddexp(lse, block_lse)")


# Adding a block


def blocks_of_ring(rank: int, ranks: int, *scores: float) -> list:
    """Return the blocks in the order of their arrival in a ring, two from each rank."""
    owners = [(rank - step) % ranks for step in range(ranks)]
    return [block(rank, 10 + 2 * owner + half, *scores) for owner in owners for half in (0, 1)]


def taken_in(blocks, mistake: str = ""):
    """Compute attention block by block, with an optional planted ``mistake``."""
    import torch

    top, total, out = nothing()[1], torch.zeros(QUERIES).double(), nothing()[0]
    for scores, values in blocks:
        # Online softmax: when the maximum grows, earlier sums are rescaled to the new maximum.
        new_top = torch.maximum(top, scores.amax(-1))
        weights = (scores - new_top[:, None]).exp()
        rescaled = (top - new_top).exp()
        of_out = torch.ones_like(rescaled) if mistake in ("out-not-rescaled", "not-rescaled") else rescaled
        of_total = torch.ones_like(rescaled) if mistake in ("total-not-rescaled", "not-rescaled") else rescaled
        weights = weights * rescaled[:, None] if mistake == "new-rescaled" else weights
        if mistake == "top-not-carried":
            top = nothing()[1]
        total, out = total * of_total + weights.sum(-1), out * of_out[:, None] + weights @ values
        top = top if mistake == "top-not-carried" else new_top
    return out / total[:, None]


def observe_add_block(add_block, comm):
    """Return attention computed block by block with the answer, or an error."""
    import torch

    seen = {}
    for what, scores_of in SCORES.items():
        top, total, out = nothing()[1], torch.zeros(QUERIES).double(), nothing()[0]
        for scores, values in blocks_of_ring(comm.rank, comm.size, *scores_of):
            got = add_block(scores.clone(), values.clone(), top, total, out)
            shapes = (QUERIES,), (QUERIES,), (QUERIES, WIDTH)
            if not (isinstance(got, tuple) and len(got) == 3):
                return {"error": about(got)}
            if not all(is_like(each, *shape) for each, shape in zip(got, shapes, strict=True)):
                return {"error": ", ".join(map(about, got))}
            top, total, out = (each.detach().clone() for each in got)
        seen[what] = out / total[:, None]
    return seen


_RESCALED = "Rescale total and out (with [:, None]) by exp(top - new_top), and return new_top, total, out"


def judge_add_block(observations) -> None:
    """Check the result of all blocks in each case."""
    ranks = len(observations)
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong("type", rank, "top and total of (queries,), and out of (queries, width)", seen["error"],
                        "Return all three: return new_top, total, out")
    hints = {
        "out-not-rescaled": "You rescale total when a larger score arrives. Must you also rescale out?",
        "total-not-rescaled": "You rescale out when a larger score arrives. Must you also rescale total, the divisor?",
        "not-rescaled": "A larger score arrives. By which factor are the old sums too large?",
        "new-rescaled": "The weights of the new block use the new largest score. Must they be rescaled too?",
        "top-not-carried": "Which largest score did the weights of the last block use, and where do you store it?",
    }
    for what, scores in SCORES.items():
        for rank, seen in enumerate(observations):
            blocks = blocks_of_ring(rank, ranks, *scores)
            expected = f"{what}: the softmax over the keys of all {2 * ranks} blocks"
            if same(seen[what], looked_at(blocks)[0]):
                continue
            wrong = rows(rank, expected)
            for mistake, hint in hints.items():
                wrong(mistake, same(seen[what], taken_in(blocks, mistake)), "another average", hint, _RESCALED)
            if not seen[what].isfinite().all():
                first = what == "ordinary scores"
                wrong("least-score", "far" in what, "no number", *_ONE_AT_LEAST)
                wrong("no-number" if first else "overflow", True, "NaN",
                      "Before the first block top is -inf. In which direction may you subtract it?" if first
                      else f"What is exp({LARGE:g}), and what is 0 / 0? Each query needs its largest score so far.",
                      _RESCALED)
            wrong("other-average", True, "another one",
                  "Compute two blocks by hand. After each, total and out times exp(top) are plain sums. Of what?",
                  _RESCALED)


EXERCISES = {
    "merge-build": Exercise("merge", observe_merge, judge_merge, any_size=True),
    "rescaling-fix": Exercise("add_block", observe_add_block, judge_add_block, any_size=True),
}
