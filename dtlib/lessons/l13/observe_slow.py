"""Lesson 13: feedback and top-k, observed: means and what is kept, step by step, and bytes."""

COUNT, STEPS = 40, 4
FRACTIONS = (0.1, 0.31)  # 4, and 12.4 elements of 40


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


def is_like(tensor) -> bool:
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.shape == (COUNT,) and tensor.is_floating_point()


def observe_signs(compress, comm):
    return _feedback(compress, comm)


def observe_top_k(top_k, comm):
    return [_feedback(top_k, comm, fraction) for fraction in FRACTIONS]
