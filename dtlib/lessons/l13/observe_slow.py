"""Lesson 13: feedback and top-k, observed: means and what is kept, step by step, and bytes."""

COUNT, STEPS = 40, 4
FRACTIONS = (0.1, 0.31)  # 4, and 12.4 elements of 40
LONG, FEW = 70_000, 7  # 16 bits have no numbers for its last places


def gradient_of(rank: int, step: int):
    """No two of its elements are alike in size, on any rank."""
    import torch

    chance = torch.Generator().manual_seed(31 * rank + step)
    return torch.randn(COUNT, generator=chance, dtype=torch.float64) * torch.linspace(0.1, 2, COUNT).double()


def _feedback(answer, comm, *arguments) -> dict:
    """Means and what this rank keeps, step by step; bytes of the last step."""
    import torch

    from dtlib.comm.watch.recorder import recording

    kept, means, of_rank = torch.zeros(COUNT).double(), [], []
    for step in range(STEPS):
        gradient = gradient_of(comm.rank, step)
        with recording() as events:
            got = answer(comm, gradient, kept.clone(), *arguments)
        if not (isinstance(got, tuple) and len(got) == 2 and all(is_like(each) for each in got)):
            return {"error": f"{got!r:.60}", "ranks": comm.size}
        if got[1].untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr():
            return {"shared": True}
        mean, kept = (each.detach().clone() for each in got)
        means.append(mean.tolist())
        of_rank.append(kept.tolist())
    sent = sum(event.bytes for event in events if event.kind == "operation")
    return {"means": means, "kept": of_rank, "bytes": sent, "ranks": comm.size}


def is_like(tensor, count: int = COUNT) -> bool:
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.shape == (count,) and tensor.is_floating_point()


def observe_signs(compress, comm):
    return _feedback(compress, comm)


def observe_top_k(top_k, comm):
    return [_feedback(top_k, comm, fraction) for fraction in FRACTIONS], _of_long(top_k, comm)


def _of_long(top_k, comm) -> dict:
    """Whether the elements that are not 0, three of each rank near the end, arrive at their places; and bytes."""
    import torch

    from dtlib.comm.watch.recorder import recording

    nothing, last = torch.zeros(LONG).double(), torch.tensor([LONG - 21, LONG - 11, LONG - 1])
    own = nothing.index_fill(0, last - comm.rank, 1)
    with recording() as events:
        got = top_k(comm, own, nothing, (FEW - 0.5) / LONG)
    found = got[0].nonzero().flatten().tolist() if isinstance(got, tuple) and is_like(got[0], LONG) else []
    sent = sum(event.bytes for event in events if event.kind == "operation")
    return {
        "at their places": found == sorted(place - rank for place in last.tolist() for rank in range(comm.size)),
        "bytes": sent,
    }
