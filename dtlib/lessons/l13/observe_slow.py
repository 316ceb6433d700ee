"""Observation of error feedback and top-k: means and residuals of each step, and bytes."""

COUNT, STEPS = 40, 4
FRACTIONS = (0.1, 0.31)  # 4, and 12.4 elements of 40
LONG, FEW = 70_000, 7  # its last indices do not fit 16 bits


def gradient_of(rank: int, step: int):
    """Return a rank's gradient in a step; no two elements have the same absolute value."""
    import torch

    chance = torch.Generator().manual_seed(31 * rank + step)
    return torch.randn(COUNT, generator=chance, dtype=torch.float64) * torch.linspace(0.1, 2, COUNT).double()


def _feedback(answer, comm, *arguments) -> dict:
    """Return means and this rank's residuals, step by step, and the bytes of the last step."""
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
    """Return whether ``tensor`` is a floating-point vector of this length."""
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.shape == (count,) and tensor.is_floating_point()


def observe_signs(compress, comm):
    """Observe ``compress(comm, gradient, kept)``."""
    return _feedback(compress, comm)


def observe_top_k(top_k, comm):
    """Observe ``top_k(comm, gradient, kept, fraction)``, also with a long vector."""
    return [_feedback(top_k, comm, fraction) for fraction in FRACTIONS], _of_long(top_k, comm)


def _of_long(top_k, comm) -> dict:
    """Return whether nonzero elements near the end of a long vector arrive at their places, and the bytes."""
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
