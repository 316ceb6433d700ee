"""Lesson 04b: check of a loss for uneven batches by the weight of each rank's gradient in the average."""

from dtlib.lab.checks.exercise import Exercise, rows

KINDS = ("uneven", "regrouped", "short")  # with "short" the last rank has no image


def images_of(rank: int, kind: str, ranks: int) -> int:
    """Return the number of images of a rank."""
    if kind == "short":
        return 2 * (rank < ranks - 1 or ranks == 1)
    return rank + 2 if kind == "uneven" else 2 * (ranks - rank) + 1


def observe(weighted_loss, comm):
    """Return for each kind of batch ("loss" or an error, weight of this rank's mean gradient)."""
    import torch
    from torch import nn

    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    seen = []
    for kind in KINDS:
        images = torch.randn(images_of(comm.rank, kind, comm.size), 6, dtype=torch.float64)
        labels = torch.arange(len(images)) % 4
        net.zero_grad()
        loss = weighted_loss(comm, net, images, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen.append((f"{loss!r:.60}", None))
        elif not loss.requires_grad:
            seen.append(("no graph", None))
        elif not loss.isfinite():
            seen.append(("no number", None))
        else:
            seen.append(_weight(net, loss, images, labels))
    return seen


def _weight(net, loss, images, labels) -> tuple[str, float | None]:
    """Return the verdict on a loss, and its gradient divided by that of the images' mean loss.

    The second value is None if the gradients have different directions.
    """
    import torch
    from torch.nn.functional import cross_entropy

    weights = list(net.parameters())
    got = torch.autograd.grad(loss, weights, allow_unused=True)
    if all(g is None for g in got):  # torch's DDP would then send nothing
        return "no graph", None
    got = [torch.zeros_like(w) if g is None else g for g, w in zip(got, weights, strict=True)]
    if not len(images):
        return "loss", None if any(g.any() for g in got) else 0.0
    mean = torch.autograd.grad(cross_entropy(net(images), labels), weights)
    got, mean = (torch.cat([g.flatten().double() for g in each]) for each in (got, mean))
    ratio = (got @ mean / (mean @ mean)).item()
    return "loss", ratio if torch.allclose(got, ratio * mean, rtol=1e-5, atol=1e-8) else None


def judge(observations) -> None:
    """Check that each image has the same weight: a rank's weight is ranks x its images / all images."""
    size = len(observations)
    for kind, cases in zip(KINDS, zip(*observations, strict=True), strict=True):
        counts = [images_of(rank, kind, size) for rank in range(size)]
        right = [size * count / sum(counts) for count in counts]
        where = f"ranks with {_words(counts, '{}')} images"
        for rank, (said, weight) in enumerate(cases):
            wrong = rows(rank, f"a loss on {where}")
            wrong("nan-of-none", said == "no number", "not a finite number",
                  "What is the mean of no images? Which reduction has a value for no images?",
                  'cross_entropy(..., reduction="sum") of no images is 0. Divide by the images of all ranks.')
            wrong("no-graph", said == "no graph", "a tensor without a graph to the parameters of the model",
                  "A rank without images must call backward() too. Does its loss depend on the model?",
                  "Compute the loss from model(images) also for no images, without item() and detach().")
            wrong("type", said != "loss", said, "Return the loss, a tensor with one number.",
                  "return cross_entropy(...), multiplied or divided by a number.")
            wrong("other-values", weight is None, "a gradient that is not a multiple of the gradient of its mean loss",
                  "A weight is one number for the whole rank. What else does your loss contain?",
                  'Use only model(images), labels and the numbers of images: cross_entropy(..., reduction="sum").')
        got = [weight for _, weight in cases]
        if not _same(got, right):
            _judge_weights(kind, counts, got, right, where)


def _judge_weights(kind, counts, got, right, where) -> None:
    size, total = len(counts), sum(counts)
    wrong = rows(None, f"the mean losses of {where} with weights {_words(right)}", f"weights {_words(got)}")
    mean = total // size
    wrong("whole-number-mean", kind == "short" and mean and _same(got, [count / mean for count in counts]),
          "The mean number of images per rank may be a fraction. Does your code use // or int()?",
          "comm.size * len(images) / total.")
    wrong("ranks-with-images", kind == "short", "The last rank has no image. Is it counted as a rank in your average?",
          "comm.size * len(images) / total. comm.size includes the ranks without images.")
    wrong("weight-remembered", kind == "regrouped",
          "The first batch was right. In this batch the ranks have other numbers of images. Do you count again?",
          "Count in every call: all_reduce torch.tensor(len(images)).")
    wrong("unweighted", _same(got, [1] * size) or _same(got, [1 / size] * size),
          "All ranks have the same weight, so an image on a rank with few images counts more.",
          "How many images does this rank have, and how many have all ranks? all_reduce gives the second number.")
    wrong("average-forgotten", _same(got, [count / total for count in counts]),
          "Your weights add up to 1, and the average over ranks divides again. What should the weights add up to?",
          "Multiply by comm.size: the gradients are averaged, not added.")
    wrong("not-divided", _same(got, counts) or _same(got, [size * count for count in counts]),
          "All images now have the same weight, but the sum is too large. By how many images do you divide?",
          "Divide by the images of all ranks together.")
    inverse = any(_same(got, [c / count for count in counts]) for c in (1, size, total, total / size))
    wrong("upside-down", inverse, "The rank with more images has the smaller weight. What do you divide by what?",
          "comm.size * len(images) / total.")
    wrong("largest", any(_same(got, [c * count / max(counts) for count in counts]) for c in (1, size)),
          "You divide by the largest number of images. Which op is a sum?", 'all_reduce with op="sum".')
    factor = next(g / r for g, r in zip(got, right, strict=True) if r)
    wrong("scaled", _same(got, [factor * r for r in right]),
          f"All images count equally, but the gradient is {factor:.3g} times the right one. Which factor is wrong?",
          "The mean of the weights of all ranks is 1: comm.size * len(images) / total.")
    wrong("other-weights", True, "What is the sum of the weights of all ranks? It should be the number of ranks.",
          "comm.size * len(images) / total. total is the all_reduce of len(images).")


def _same(got, wanted) -> bool:
    return all(abs(a - b) < 1e-5 * (1 + abs(b)) for a, b in zip(got, wanted, strict=True))


def _words(values, form="{:.3g}") -> str:
    *first, last = (form.format(value) for value in values)
    return f"{', '.join(first)} and {last}" if first else last


EXERCISES = {"weight-the-batch": Exercise("weighted_loss", observe, judge, any_size=True)}
