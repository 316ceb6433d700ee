"""Lesson 13: checks of error feedback and top-k, by values on every rank and payload bytes."""

import math

from dtlib.lab.checks.equality import as_tensor, factors, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l13.observe_slow import COUNT, FEW, FRACTIONS, STEPS, gradient_of, observe_signs, observe_top_k


def signs_of(wanted):
    """Return the signs of ``wanted``, times its mean absolute value: a rank's message."""
    return wanted.sign() * wanted.abs().mean()


def largest_of(wanted, fraction: float):
    """Return ``wanted`` with all but its largest elements set to zero."""
    import torch

    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    return torch.zeros_like(wanted).index_put((places,), wanted[places])


def played(
    send, ranks: int, feedback: str = "right", mean_of=lambda sent, rank: sum(sent) / len(sent), rank=0, sent_of=None
) -> dict:
    """Return a rank's means and rank 0's residuals, step by step, computed in one process.

    Mistakes can be planted with ``feedback``, ``mean_of`` and ``sent_of``.
    """
    import torch

    kept, means, of_rank_0 = [torch.zeros(COUNT).double() for _ in range(ranks)], [], []
    for step in range(STEPS):
        own = [gradient_of(rank, step) for rank in range(ranks)]
        # Right: wanted = gradient + kept; send a part of it; keep the rest. The other branches are planted mistakes.
        factor = {"none": 0, "beside": 0, "other sign": -1}.get(feedback, 1)
        wanted = [g + factor * k for g, k in zip(own, kept, strict=True)]
        sent = sent_of(wanted, own) if sent_of else [send(w) for w in wanted]
        if feedback == "beside":
            sent = [s + k for s, k in zip(sent, kept, strict=True)]
        less = [a - b for a, b in zip(wanted, sent, strict=True)]
        mean = mean_of(sent, rank)
        kept = {
            "forgotten": [a - b for a, b in zip(own, sent, strict=True)],
            "of the mean": [a - mean for a in wanted],
            "all": wanted,
            "twice": [a + b for a, b in zip(kept, less, strict=True)],
            "others' too": [w * sum(s != 0 for s in sent).eq(0) for w in wanted],
        }.get(feedback, less)
        means.append(mean.tolist())
        of_rank_0.append(kept[0].tolist())
    return {"means": means, "kept": of_rank_0}


def overwritten(sent, rank: int):
    """Return a wrong mean: if several ranks send an element, the last one counts."""
    mean = sum(sent) * 0
    for one in sent:
        mean[one != 0] = one[one != 0] / len(sent)
    return mean


def at_own_places(sent, rank: int):
    """Return a wrong mean: values are averaged by their order, and written to this rank's places."""
    import torch

    def in_order(one):
        places = one.abs().topk(int((one != 0).sum())).indices
        return places, one[places]

    means = sum(in_order(one)[1] for one in sent) / len(sent)
    return torch.zeros_like(sent[0]).index_put((in_order(sent[rank])[0],), means)


def of_top_k(fraction: float) -> dict:
    """Return mistakes that only top-k can have: arguments of ``played``, and hints."""

    def largest(wanted):
        return largest_of(wanted, fraction)

    def signed(wanted):
        return largest_of(wanted - wanted.min(), fraction).sign() * wanted

    def floor(wanted):
        return largest_of(wanted, math.floor(fraction * COUNT) / COUNT)

    def smallest(wanted):
        return wanted * largest_of(1 / wanted, fraction).ne(0)

    def k_shared_out(wanted, own):
        return [largest_of(w, fraction / len(wanted)) for w in wanted]

    def of_sizes(sent, rank):
        return sum(one.abs() for one in sent) / len(sent)

    def by_senders(sent, rank):
        return sum(sent) / sum(one.ne(0) for one in sent).clamp(min=1)

    def by_gradient(wanted, own):
        return [w * largest_of(g, fraction).ne(0) for w, g in zip(wanted, own, strict=True)]

    def by_rank_0(wanted, own):
        return [w * largest_of(wanted[0], fraction).ne(0) for w in wanted]

    return {
        "k-rounded": ({"send": floor},
                      f"{fraction} of {COUNT} are {fraction * COUNT:g} elements. How many do you send?",
                      "k = math.ceil(fraction * len(gradient)): round up."),
        "by-gradient": ({"send": largest, "sent_of": by_gradient},
                        "The kept part grows. When do you send such a position?",
                        "Select positions by (gradient + kept).abs(), not by the gradient alone."),
        "rank-0-places": ({"send": largest, "sent_of": by_rank_0}, "Which rank's largest elements does each rank send?",
                          "Each rank selects its own positions, and all_gather sends them to the other ranks."),
        "others-dropped": ({"send": largest, "feedback": "others' too"},
                           "Another rank sent an element, and this rank did not. Which rank must keep it?",
                           "wanted.index_fill(0, places, 0), with this rank's own places."),
        "overwritten": ({"send": largest, "mean_of": overwritten},
                        "Two ranks may send one position: what happens?",
                        "mean.index_add_(0, places, values / comm.size) adds; mean[places] = values overwrites."),
        "own-places": ({"send": largest, "mean_of": at_own_places},
                       "Positions differ between ranks. Who sends them?",
                       "all_gather the positions too."),
        "unsigned": ({"send": largest, "mean_of": of_sizes},
                     "Do you send values with their signs?",
                     "places = wanted.abs().topk(k).indices; values = wanted[places]"),
        "smallest": ({"send": smallest},
                     "Should you send the largest sizes, or the smallest?",
                     "wanted.abs().topk(k).indices"),
        "by-senders": ({"send": largest, "mean_of": by_senders},
                       "Does your mean include ranks that send nothing, as 0?",
                       "mean.index_add_(0, places, values / comm.size)"),
        "k-shared-out": ({"send": largest, "sent_of": k_shared_out}, "How many elements does each rank send?",
                         "k = math.ceil(fraction * len(gradient)), on each rank."),
        "signed": ({"send": signed}, "Which is larger, -5 or 1? Compare absolute values.",
                   "wanted.abs().topk(k).indices"),
    }


def judge_signs(observations) -> None:
    """Check means and residuals of sign compression."""

    def own_scale(wanted, own):
        return [w.sign() * g.abs().mean() for w, g in zip(wanted, own, strict=True)]

    others = {
        "gradient-scale": ({"send": signs_of, "sent_of": own_scale}, "From which tensor do you compute the mean size?",
                           "wanted.sign() * wanted.abs().mean()"),
        "kept-sent-whole": ({"send": signs_of, "feedback": "beside"},
                            "You send the kept part unchanged. Is that one bit per number?",
                            "Add it before you compute signs: wanted = gradient + kept, then wanted.sign()."),
    }
    _judge_feedback(observations, signs_of, others)


def judge_top_k(observations) -> None:
    """Check means, residuals, indices and bytes of top-k."""
    for fraction, seen in zip(FRACTIONS, zip(*(one for one, _ in observations), strict=True), strict=True):
        _judge_feedback(seen, lambda wanted, fraction=fraction: largest_of(wanted, fraction), of_top_k(fraction))
        _judge_bytes(seen, math.ceil(fraction * COUNT))
    for rank, (_, long) in enumerate(observations):
        rows(rank)("small-places", not long["at their places"], "the mean of 70,000 elements", "another one",
                   f"It is right with {COUNT} elements. Can the type of the positions store 70,000?",
                   "int16 ends at 32,767, and uint8 at 255: send positions as int32, or as int64, the type of topk.")
    _judge_bytes([long for _, long in observations], FEW)


def _judge_bytes(seen, k: int) -> None:
    most = (len(seen) - 1) * k * (8 + 8)
    for rank, one in enumerate(seen):
        rows(rank)("too-many-bytes", one["bytes"] > most,
                   f"at most {most} bytes for k = {k} on {len(seen)} ranks: positions and values, by all_gather",
                   f"{one['bytes']} bytes",
                   "The values are right. Do you send k elements, or all, or also zeros and equal values?",
                   "Two all_gathers of k elements each: positions, and wanted[places]. Then index_add_ into zeros.")


def _judge_feedback(observations, send, others=None) -> None:
    for rank, seen in enumerate(observations):
        wrong = rows(rank)
        wrong("type", "error" in seen, f"two tensors of {COUNT} numbers: the mean, and the kept part",
              seen.get("error"), "Return both: return mean, kept")
        wrong("kept-is-gradient", "shared" in seen, "the kept part, in separate memory",
              "the gradient that was passed",
              "The next backward pass writes its gradient into this tensor. What happens to the kept part?",
              "wanted = gradient + kept is a new tensor; += writes into the caller's.")
    ranks = len(observations)
    right = played(send, ranks)
    for rank, seen in enumerate(observations):
        if not close(seen["means"], right["means"]):
            _explain(rank, seen, send, ranks, others or {})
    if not close(observations[0]["kept"], right["kept"]):
        raise Wrong("kept", 0, "the wanted values minus the sent values", "something else",
                    "The next step needs the part that is kept after the last step.", "kept = gradient + kept - sent")


def _explain(rank: int, seen: dict, send, ranks: int, others: dict) -> None:
    got, what = seen["means"], f"the mean over {ranks} ranks of what they sent, with feedback, in {STEPS} steps"
    wrong = rows(rank, what)
    for factor, mistake in ((ranks, "sum"), (1 / ranks, "divided-twice")):
        wrong(mistake, close(got[:1], [[factor * x for x in played(send, ranks)["means"][0]]]),
              f"{factor:.3g} times as much", "Which line divides by the number of ranks, and how often?")
    mistakes = {
        "none": ("no-feedback", "Where do you use, in the second step, the part that was not sent in the first?",
                 "wanted = gradient + kept. Send a part of wanted."),
        "forgotten": ("forgets", "The kept part is lost after one more step. From what do you subtract the sent part?",
                      "kept = wanted - sent, with wanted = gradient + kept: it includes the old kept part."),
        "of the mean": ("of-the-mean", "What did *this* rank send? The mean includes values of other ranks.",
                        "kept = wanted - sent, before you average."),
        "other sign": ("feedback-subtracted", "The part that was not sent is still wanted. Do you add it?",
                       "wanted = gradient + kept"),
        "twice": ("kept-twice", "wanted already includes the kept part. How often do you keep it now?",
                  "kept = wanted - sent"),
        "all": ("keeps-all", "Sent values must not be sent again. What do you subtract?", "kept = wanted - sent"),
    }
    for feedback, (mistake, *hints) in mistakes.items():
        wrong(mistake, close(got, played(send, ranks, feedback)["means"]), "right in the first step, and wrong later",
              *hints)
    first = close(got[:1], played(send, ranks)["means"][:1])
    since = "after the first step" if first else "from the first step on"
    wrong("rounded", all(abs(a - b) <= 0.02 for ones, more in zip(got, played(send, ranks)["means"], strict=True)
          for a, b in zip(ones, more, strict=True)), f"nearly right, {since}",
          "In which type do you send values?", "Use the gradient's type; only positions may differ.")
    for mistake, (settings, *hints) in others.items():
        wrong(mistake, close(got, played(**settings, ranks=ranks, rank=rank)["means"]), f"wrong, {since}", *hints)
    wrong("alone", close(got, _alone(send, rank)), "only the values that this rank sends",
          "Where do you use the other ranks' values?")
    if not first and (found := factors(as_tensor(got[0]), *(send(gradient_of(r, 0)) for r in range(ranks)))):
        wrong("scaled", True, f"{ranks * found[rank]:.3g} times the right value for rank {rank}, in the first step",
              "By what do you multiply the sent values?",
              "Signs times wanted.abs().mean(), one number for each rank; for top-k, the unchanged values.")
    own, sent = gradient_of(rank, 0), send(gradient_of(rank, 0))
    # Right: kept = 1 * gradient - 1 * sent. Other factors are mistakes.
    keeps = factors(as_tensor(seen["kept"][0]), own, sent)
    if first and keeps and not same(as_tensor(keeps), as_tensor([1, -1])):
        raise Wrong(
            "kept-otherwise", rank, f"{what}: kept of the first step is the gradient minus the sent values",
            f"{keeps[0]:.2f} times the gradient, {keeps[1]:+.2f} times the sent values",
            "Keep all wanted values that were not sent, with their signs. Do you divide or drop some?",
            "kept = wanted - sent")
    wrong("other-values", True, f"wrong, {since}",
          "wanted = gradient + kept. Send a part of it, and keep the rest.")


def _alone(send, rank: int) -> list:
    import torch

    kept, means = torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        wanted = gradient_of(rank, step) + kept
        kept = wanted - send(wanted)
        means.append(send(wanted).tolist())
    return means


def close(got, expected) -> bool:
    """Return whether two lists of lists are equal up to rounding."""
    return len(got) == len(expected) and all(
        abs(a - b) < 1e-9 for ones, others in zip(got, expected, strict=True) for a, b in zip(ones, others, strict=True)
    )


EXERCISES = {
    "feedback-fix": Exercise("compress", observe_signs, judge_signs, any_size=True),
    "top-k-build": Exercise("top_k", observe_top_k, judge_top_k, any_size=True),
}
