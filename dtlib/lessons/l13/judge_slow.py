"""Lesson 13: feedback, an outer step and top-k, judged by values on every rank and by payload bytes."""

import math

from dtlib.lab.checks.exercise import Exercise, Wrong

COUNT, STEPS, RATE, MOMENTUM = 40, 4, 0.5, 0.8
FRACTIONS = (0.1, 0.3)


def gradient_of(rank: int, step: int):
    """No two of its elements are alike in size, on any rank."""
    import torch

    chance = torch.Generator().manual_seed(31 * rank + step)
    return torch.randn(COUNT, generator=chance, dtype=torch.float64) * torch.linspace(0.1, 2, COUNT).double()


def signs_of(wanted):
    """What a rank sends for it: signs, times their mean size."""
    return wanted.sign() * wanted.abs().mean()


def largest_of(wanted, fraction: float):
    """The largest elements of it; zeros elsewhere."""
    import torch

    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    return torch.zeros_like(wanted).index_put((places,), wanted[places])


def played(send, ranks: int, feedback: str = "right", mean_of=lambda sent, rank: sum(sent) / len(sent), rank=0) -> dict:
    """Means of a rank, and what rank 0 keeps, step by step; ``feedback`` and ``mean_of`` may be mistakes."""
    import torch

    kept, means, of_rank_0 = [torch.zeros(COUNT).double() for _ in range(ranks)], [], []
    for step in range(STEPS):
        own = [gradient_of(rank, step) for rank in range(ranks)]
        wanted = [g + k if feedback != "none" else g for g, k in zip(own, kept, strict=True)]
        sent = [send(w) for w in wanted]
        mean = mean_of(sent, rank)
        kept = {
            "right": lambda w=wanted, s=sent: [a - b for a, b in zip(w, s, strict=True)],
            "none": lambda w=wanted, s=sent: [a - b for a, b in zip(w, s, strict=True)],
            "forgotten": lambda g=own, s=sent: [a - b for a, b in zip(g, s, strict=True)],
            "of the mean": lambda w=wanted, m=mean: [a - m for a in w],
            "all": lambda w=wanted: w,
        }[feedback]()
        means.append(mean.tolist())
        of_rank_0.append(kept[0].tolist())
    return {"means": means, "kept": of_rank_0}


def _feedback(answer, comm, *arguments) -> dict:
    """Means and what this rank keeps, step by step; bytes of the last step."""
    import torch

    from dtlib.comm.watch.recorder import recording

    kept, means, of_rank = torch.zeros(COUNT).double(), [], []
    for step in range(STEPS):
        with recording() as events:
            came = answer(comm, gradient_of(comm.rank, step), kept.clone(), *arguments)
        if not (isinstance(came, tuple) and len(came) == 2 and all(_is_like(each) for each in came)):
            return {"error": f"{came!r:.60}", "ranks": comm.size}
        mean, kept = (each.detach().clone() for each in came)
        means.append(mean.tolist())
        of_rank.append(kept.tolist())
    sent = sum(event.bytes for event in events if event.kind == "operation")
    return {"means": means, "kept": of_rank, "bytes": sent, "ranks": comm.size}


def _is_like(tensor) -> bool:
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.shape == (COUNT,) and tensor.is_floating_point()


def observe_signs(compress, comm):
    return _feedback(compress, comm)


def observe_top_k(top_k, comm):
    return [_feedback(top_k, comm, fraction) for fraction in FRACTIONS]


def overwritten(sent, rank: int):
    """Where several ranks send an element, the last one counts."""
    mean = sum(sent) * 0
    for one in sent:
        mean[one != 0] = one[one != 0] / len(sent)
    return mean


def at_own_places(sent, rank: int):
    """The first of each rank's, the second of each, ... are averaged, and are put where this rank's were."""
    import torch

    def in_order(one):
        places = one.abs().topk(int((one != 0).sum())).indices
        return places, one[places]

    means = sum(in_order(one)[1] for one in sent) / len(sent)
    return torch.zeros_like(sent[0]).index_put((in_order(sent[rank])[0],), means)


def of_top_k(fraction: float) -> dict:
    """Mistakes that top-k alone can have: what is sent, how it becomes a mean, and what is said."""

    def largest(wanted):
        return largest_of(wanted, fraction)

    def signed(wanted):
        return largest_of(wanted - wanted.min(), fraction).sign() * wanted

    return {
        "overwritten": ({"send": largest, "mean_of": overwritten}, "Two ranks may send the same place: and then?",
                        "mean.index_add_(0, places, values / comm.size) adds; mean[places] = values overwrites."),
        "own-places": ({"send": largest, "mean_of": at_own_places}, "Each rank has other places: who tells the others?",
                       "all_gather the places, too."),
        "signed": ({"send": signed}, "Which is larger, -5 or 1? By size, not by sign.", "wanted.abs().topk(k).indices"),
    }  # fmt: skip


def judge_signs(observations) -> None:
    _judge_feedback(observations, signs_of)


def judge_top_k(observations) -> None:
    for fraction, seen in zip(FRACTIONS, zip(*observations, strict=True), strict=True):
        _judge_feedback(seen, lambda wanted, fraction=fraction: largest_of(wanted, fraction), of_top_k(fraction))
        ranks, k = len(seen), math.ceil(fraction * COUNT)
        most = (ranks - 1) * k * (8 + 8)
        for rank, one in enumerate(seen):
            if one["bytes"] > most:
                raise Wrong(
                    "too-many-bytes", rank,
                    f"at most {most} bytes for k = {k} on {ranks} ranks: places and values, by all_gather",
                    f"{one['bytes']} bytes",
                    "The values are right. What travels: all elements, zeros among them, or k of them?",
                    "Two all_gathers of k elements each: places, and wanted[places]. Then index_add_ into zeros.",
                )  # fmt: skip


def _judge_feedback(observations, send, others=None) -> None:
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong(
                "type", rank, f"two tensors of {COUNT} numbers: the mean, and what is kept", seen["error"],
                "Return both: return mean, kept",
            )  # fmt: skip
    ranks = len(observations)
    right = played(send, ranks)
    for rank, seen in enumerate(observations):
        if not _close(seen["means"], right["means"]):
            _explain(rank, seen, send, ranks, others or {})
    if not _close(observations[0]["kept"], right["kept"]):
        raise Wrong(
            "kept", 0, "what was wanted, less what was sent", "something else, which the last step would need",
            "What is kept after the last step belongs to the next one.", "kept = gradient + kept - sent",
        )  # fmt: skip


def _explain(rank: int, seen: dict, send, ranks: int, others: dict) -> None:
    came, what = seen["means"], f"the mean over {ranks} ranks of what each sends, with feedback, {STEPS} times"
    for factor, mistake in ((ranks, "sum"), (1 / ranks, "divided-twice")):
        if _close(came[:1], [[factor * x for x in played(send, ranks)["means"][0]]]):
            raise Wrong(mistake, rank, what, f"{factor:.3g} times as much", "Who divides by the ranks, and how often?")
    mistakes = {
        "none": ("no-feedback", "In the second step: where is what was not sent in the first?",
                 "wanted = gradient + kept, and send of that."),
        "forgotten": ("forgets", "Something is kept for one step, and lost in the one after. From what is sent taken?",
                      "kept = wanted - sent, with wanted = gradient + kept: what was kept before is in it."),
        "of the mean": ("of-the-mean", "What did *this* rank send? The mean has others' numbers in it.",
                        "kept = wanted - sent, before anything is averaged."),
        "all": ("keeps-all", "What was sent must not be sent again.", "kept = wanted - sent"),
    }  # fmt: skip
    for feedback, (mistake, *hints) in mistakes.items():
        if _close(came, played(send, ranks, feedback)["means"]):
            raise Wrong(mistake, rank, what, "right in the first step, and then others", *hints)
    for mistake, (settings, *hints) in others.items():
        if _close(came, played(**settings, ranks=ranks, rank=rank)["means"]):
            raise Wrong(mistake, rank, what, "others, from the first step on", *hints)
    if _close(came, _alone(send, rank)):
        raise Wrong("alone", rank, what, "what this rank sends, alone", "Where do the others come in?")
    first = _close(came[:1], played(send, ranks)["means"][:1])
    raise Wrong(
        "other-values", rank, what, f"others, {'after the first step' if first else 'from the first step on'}",
        "wanted = gradient + kept. Send of it what is to be sent; the rest of it is kept.",
    )  # fmt: skip


def _alone(send, rank: int) -> list:
    import torch

    kept, means = torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        wanted = gradient_of(rank, step) + kept
        kept = wanted - send(wanted)
        means.append(send(wanted).tolist())
    return means


# The outer step


def outer_played(ranks: int, mistake: str = "") -> list:
    """Where each round begins, on rank 0, in one process; ``mistake`` as planted."""
    import torch

    start, pace = torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
    own_pace, starts = [torch.zeros(COUNT).double() for _ in range(ranks)], []
    for step in range(STEPS):
        ways = [gradient_of(rank, step) for rank in range(ranks)]  # start - parameters
        way = sum(ways) / ranks
        if mistake == "own-pace":
            own_pace = [MOMENTUM * p + w for p, w in zip(own_pace, ways, strict=True)]
            way, pace = ways[0], own_pace[0]
        elif mistake == "sum":
            way = way * ranks
            pace = MOMENTUM * pace + way
        else:
            pace = MOMENTUM * pace + way
        looked_ahead = pace if mistake == "heavy-ball" else way if mistake == "no-momentum" else way + MOMENTUM * pace
        start = start + RATE * looked_ahead if mistake == "wrong-way" else start - RATE * looked_ahead
        starts.append(start.tolist())
    return starts


def observe_outer(outer_step, comm):
    import torch

    start, pace, starts = torch.zeros(COUNT).double(), torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        parameters = start - gradient_of(comm.rank, step)
        came = outer_step(comm, start.clone(), parameters, pace.clone(), RATE, MOMENTUM)
        if not (isinstance(came, tuple) and len(came) == 2 and all(_is_like(each) for each in came)):
            return {"error": f"{came!r:.60}"}
        start, pace = (each.detach().clone() for each in came)
        starts.append(start.tolist())
    return {"starts": starts}


def judge_outer(observations) -> None:
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong(
                "type", rank, f"two tensors of {COUNT} numbers: the new start, and the pace", seen["error"],
                "Return both: return start, pace",
            )  # fmt: skip
    ranks, what = len(observations), f"Nesterov's step along the mean way, the same on all ranks, in {STEPS} rounds"
    right = outer_played(ranks)
    if len(observations) > 1 and any(not _close(seen["starts"], observations[0]["starts"]) for seen in observations):
        raise Wrong(
            "ranks-differ", 1, what, "ranks begin the next round in different places",
            "Which of the numbers are this rank's own: is the pace made of them, or of their mean?",
            "way = comm.all_reduce(start - parameters, op='mean') comes first; then pace = momentum * pace + way.",
        )  # fmt: skip
    hints = {
        "sum": ("The way is the mean over ranks: who divides?", "op='mean'"),
        "heavy-ball": ("That is momentum without Nesterov's look ahead.", "start - rate * (way + momentum * pace)"),
        "no-momentum": ("The pace is computed: where is it used?", "start - rate * (way + momentum * pace)"),
        "wrong-way": ("The way is start - parameters: a gradient points uphill.", "start - rate * (...)"),
    }
    for rank, seen in enumerate(observations):
        if _close(seen["starts"], right):
            continue
        for mistake, said in hints.items():
            if _close(seen["starts"], outer_played(ranks, mistake)):
                raise Wrong(mistake, rank, what, "another step", *said)
        raise Wrong(
            "other-step", rank, what, "another step",
            "Three lines: the mean way, the pace, the start.",
            "pace = momentum * pace + way; start = start - rate * (way + momentum * pace)",
        )  # fmt: skip


def _close(came, expected) -> bool:
    return len(came) == len(expected) and all(
        abs(a - b) < 1e-9
        for ones, others in zip(came, expected, strict=True)
        for a, b in zip(ones, others, strict=True)
    )


EXERCISES = {
    "outer-fix": Exercise("outer_step", observe_outer, judge_outer, any_size=True),
    "feedback-fix": Exercise("compress", observe_signs, judge_signs, any_size=True),
    "top-k-build": Exercise("top_k", observe_top_k, judge_top_k, any_size=True),
}
