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
        "k-rounded": ({"send": floor}, f"{fraction} of {COUNT} are {fraction * COUNT:g} elements. How many are sent?",
                      "k = math.ceil(fraction * len(gradient)): round up."),
        "by-gradient": ({"send": largest, "sent_of": by_gradient}, "What was kept grows. When is such a place sent?",
            "Choose places by (gradient + kept).abs(), not by the gradient alone."),
        "rank-0-places": ({"send": largest, "sent_of": by_rank_0}, "Whose largest elements do other ranks send?",
                          "Each rank chooses its own places, and all_gather tells them to the others."),
        "others-dropped": ({"send": largest, "feedback": "others' too"},
                           "An element that another rank has sent, and this one has not: who keeps it?",
                           "wanted.index_fill(0, places, 0), with this rank's own places."),
        "overwritten": ({"send": largest, "mean_of": overwritten}, "Two ranks may send the same place: and then?",
                        "mean.index_add_(0, places, values / comm.size) adds; mean[places] = values overwrites."),
        "own-places": ({"send": largest, "mean_of": at_own_places}, "Each rank has other places: who tells the others?",
                       "all_gather the places, too."),
        "unsigned": ({"send": largest, "mean_of": of_sizes}, "What travels: sizes, or values with their signs?",
                     "places = wanted.abs().topk(k).indices; values = wanted[places]"),
        "smallest": ({"send": smallest}, "Which elements are worth their bytes: the largest in size, or the smallest?",
                     "wanted.abs().topk(k).indices"),
        "by-senders": ({"send": largest, "mean_of": by_senders}, "Some ranks send nothing: are they in the mean, as 0?",
                       "mean.index_add_(0, places, values / comm.size)"),
        "k-shared-out": ({"send": largest, "sent_of": k_shared_out}, "How many elements does each rank send?",
                         "k = math.ceil(fraction * len(gradient)), on each rank."),
        "signed": ({"send": signed}, "Which is larger, -5 or 1? By size, not by sign.", "wanted.abs().topk(k).indices"),
    }


def judge_signs(observations) -> None:
    """Check means and residuals of sign compression."""

    def own_scale(wanted, own):
        return [w.sign() * g.abs().mean() for w, g in zip(wanted, own, strict=True)]

    others = {
        "gradient-scale": ({"send": signs_of, "sent_of": own_scale}, "Of which tensor is the mean size taken?",
                           "wanted.sign() * wanted.abs().mean()"),
        "kept-sent-whole": ({"send": signs_of, "feedback": "beside"},
                            "What was kept travels as it is: is that a bit for each number?",
                            "Add it before signs are taken: wanted = gradient + kept, then wanted.sign()."),
    }
    _judge_feedback(observations, signs_of, others)


def judge_top_k(observations) -> None:
    """Check means, residuals, indices and bytes of top-k."""
    for fraction, seen in zip(FRACTIONS, zip(*(one for one, _ in observations), strict=True), strict=True):
        _judge_feedback(seen, lambda wanted, fraction=fraction: largest_of(wanted, fraction), of_top_k(fraction))
        _judge_bytes(seen, math.ceil(fraction * COUNT))
    for rank, (_, long) in enumerate(observations):
        rows(rank)("small-places", not long["at their places"], "the mean of 70,000 elements", "another one",
                   f"With {COUNT} elements it is right. Has the type of the places numbers as large as 70,000?",
                   "int16 ends at 32,767, and uint8 at 255: places travel as int32, or as int64, as topk gives them.")
    _judge_bytes([long for _, long in observations], FEW)


def _judge_bytes(seen, k: int) -> None:
    most = (len(seen) - 1) * k * (8 + 8)
    for rank, one in enumerate(seen):
        rows(rank)("too-many-bytes", one["bytes"] > most,
                   f"at most {most} bytes for k = {k} on {len(seen)} ranks: places and values, by all_gather",
                   f"{one['bytes']} bytes",
                   "The values are right. What travels: k elements, or all, zeros and those of the same size, too?",
                   "Two all_gathers of k elements each: places, and wanted[places]. Then index_add_ into zeros.")


def _judge_feedback(observations, send, others=None) -> None:
    for rank, seen in enumerate(observations):
        wrong = rows(rank)
        wrong("type", "error" in seen, f"two tensors of {COUNT} numbers: the mean, and what is kept", seen.get("error"),
              "Return both: return mean, kept")
        wrong("kept-is-gradient", "shared" in seen, "what is kept, in memory of its own",
              "the gradient that was passed",
              "The next backward pass writes its gradient into that tensor: what is kept then?",
              "wanted = gradient + kept is a new tensor; += writes into the caller's.")
    ranks = len(observations)
    right = played(send, ranks)
    for rank, seen in enumerate(observations):
        if not close(seen["means"], right["means"]):
            _explain(rank, seen, send, ranks, others or {})
    if not close(observations[0]["kept"], right["kept"]):
        raise Wrong("kept", 0, "what was wanted, less what was sent", "something else, which the last step would need",
                    "What is kept after the last step belongs to the next one.", "kept = gradient + kept - sent")


def _explain(rank: int, seen: dict, send, ranks: int, others: dict) -> None:
    got, what = seen["means"], f"the mean over {ranks} ranks of what each sends, with feedback, {STEPS} times"
    wrong = rows(rank, what)
    for factor, mistake in ((ranks, "sum"), (1 / ranks, "divided-twice")):
        wrong(mistake, close(got[:1], [[factor * x for x in played(send, ranks)["means"][0]]]),
              f"{factor:.3g} times as much", "Who divides by the ranks, and how often?")
    mistakes = {
        "none": ("no-feedback", "In the second step: where is what was not sent in the first?",
                 "wanted = gradient + kept, and send of that."),
        "forgotten": ("forgets", "Something is kept for one step, and lost in the one after. From what is sent taken?",
                      "kept = wanted - sent, with wanted = gradient + kept: what was kept before is in it."),
        "of the mean": ("of-the-mean", "What did *this* rank send? The mean has others' numbers in it.",
                        "kept = wanted - sent, before anything is averaged."),
        "other sign": ("feedback-subtracted", "What was not sent is still wanted: is it added?",
                       "wanted = gradient + kept"),
        "twice": ("kept-twice", "What was kept is in what is wanted already: how often is it kept now?",
                  "kept = wanted - sent"),
        "all": ("keeps-all", "What was sent must not be sent again.", "kept = wanted - sent"),
    }
    for feedback, (mistake, *hints) in mistakes.items():
        wrong(mistake, close(got, played(send, ranks, feedback)["means"]), "right in the first step, and then others",
              *hints)
    first = close(got[:1], played(send, ranks)["means"][:1])
    since = "after the first step" if first else "from the first step on"
    wrong("rounded", all(abs(a - b) <= 0.02 for ones, more in zip(got, played(send, ranks)["means"], strict=True)
          for a, b in zip(ones, more, strict=True)), f"nearly that, {since}",
          "In which type do values travel?", "They keep the type of the gradient; only places may have another.")
    for mistake, (settings, *hints) in others.items():
        wrong(mistake, close(got, played(**settings, ranks=ranks, rank=rank)["means"]), f"others, {since}", *hints)
    wrong("alone", close(got, _alone(send, rank)), "what this rank sends, alone", "Where do the others come in?")
    if not first and (found := factors(as_tensor(got[0]), *(send(gradient_of(r, 0)) for r in range(ranks)))):
        wrong("scaled", True, f"of rank {rank} {ranks * found[rank]:.3g} times what it should send, at first",
              "With what is that which is sent multiplied?",
              "Signs times wanted.abs().mean(), which is one number of each rank; of top-k, the values as they are.")
    own, sent = gradient_of(rank, 0), send(gradient_of(rank, 0))
    # Right: kept = 1 * gradient - 1 * sent. Other factors are mistakes.
    keeps = factors(as_tensor(seen["kept"][0]), own, sent)
    if first and keeps and not same(as_tensor(keeps), as_tensor([1, -1])):
        raise Wrong(
            "kept-otherwise", rank, f"{what}: kept of the first step is the gradient, less what was sent",
            f"{keeps[0]:.2f} times the gradient, {keeps[1]:+.2f} times what was sent",
            "What is wanted and was not sent is kept, all of it and with its sign: nothing is divided or forgotten.",
            "kept = wanted - sent")
    wrong("other-values", True, f"others, {since}",
          "wanted = gradient + kept. Send of it what is to be sent; the rest of it is kept.")


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
