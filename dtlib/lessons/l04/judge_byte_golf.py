"""Lesson 04, byte golf: digits learnt by ranks that have a few of them each, for as few bytes as can be."""

import builtins
import io
import time
from contextlib import contextmanager

from dtlib.errors import DtlibError
from dtlib.lab.checks.exercise import Exercise, Score, Wrong, rows

GOAL = 0.95  # accuracy
SLOWEST = 30  # seconds


def shard(rank: int, size: int):
    """A rank's training images: sorted by digit, so that none can do without the others."""
    import torch

    from dtlib.lab import digits

    (x, y), test = digits.load()
    order = torch.argsort(y, stable=True)[len(y) * rank // size : len(y) * (rank + 1) // size]
    return x[order], y[order], test


def reference(comm, x, y):
    """Par: forty steps on all images, gradients in float16."""
    import torch

    from dtlib.lab import digits

    torch.manual_seed(0)
    net = digits.net(hidden=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).half()
        comm.all_reduce(flat, op="mean", algorithm="ring")
        for parameter, piece in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True):
            parameter.grad = piece.view_as(parameter).float()
        optimizer.step()
    return net


def observe_golf(train, comm):
    """Accuracy here, payload bytes that this rank sent, seconds; the same of the reference."""
    import torch

    comm.time_limit = SLOWEST
    seen = {}
    for who, function in (("par", reference), ("mine", train)):
        x, y, (x_test, y_test) = shard(comm.rank, comm.size)
        torch.manual_seed(0)
        seen[who] = _played(function, comm, x, y, x_test, y_test)
    return seen


def _played(train, comm, x, y, x_test, y_test) -> dict:
    import torch

    from dtlib.comm.watch.recorder import recording

    began = time.monotonic()
    with recording() as events, loads_noticed(getattr(train, "__globals__", {})) as loads:
        model = train(comm, x, y)
    seconds = time.monotonic() - began
    if any(event.algorithm == "mpi4py" for event in events):
        raise DtlibError("MPI does not say what collectives of mpi4py send: take comm, or torch.distributed.")
    if not callable(model):
        return {"error": f"{model!r:.60}"}
    with torch.no_grad():
        said = model(x_test)
    if not isinstance(said, torch.Tensor) or said.shape[:1] != y_test.shape:
        return {"error": f"a model that returns {said!r:.60} for {len(x_test)} images"}
    said = said.argmax(1) if said.ndim == 2 else said
    right = (said == y_test).double().mean().item()
    sent = sum(event.bytes for event in events if event.kind == "operation")
    return {"accuracy": right, "bytes": sent, "seconds": seconds, "loads": len(loads)}


@contextmanager
def loads_noticed(names: dict):
    """A list with an entry for each time that all digits are loaded meanwhile, by whichever of dtlib's functions, or a
    file of digits is opened, as scikit-learn's function does.

    ``names`` is where the answer looks names up: there a function may have been imported on its own.
    """
    from dtlib.lab import digits
    from dtlib.workloads import digits as every_image

    loads = []

    def noticing(load):
        def noticed(*arguments, **named):
            loads.append(load)
            return load(*arguments, **named)

        return noticed

    def opened(path, *arguments, **named):
        if "digits" in str(path) and not str(path).endswith(".py"):
            loads.append(path)
        return open_(path, *arguments, **named)

    open_ = builtins.open
    originals = digits.load, every_image.load
    spaces = vars(digits), vars(every_image), names
    places = [
        (space, name, thing) for space in spaces for name, thing in space.items()
        if any(thing is load for load in originals)
    ]
    try:
        for space, name, load in places:
            space[name] = noticing(load)
        builtins.open = io.open = opened
        yield loads
    finally:
        builtins.open = io.open = open_
        for space, name, load in places:
            space[name] = load


def judge_golf(observations) -> Score:
    """At least 95 % on every rank, in 30 s, and no more bytes than par; returns the score."""
    for rank, seen in enumerate(observations):
        if "error" in seen["mine"]:
            raise Wrong("type", rank, "a function of images that returns digits, or a score for each digit",
                        seen["mine"]["error"], "What golf returns is called with the test images, on every rank.",
                        "Return the net: `return net`, as the last line.")
    for rank, seen in enumerate(observations):
        if seen["mine"]["loads"]:
            raise Wrong("loads-digits", rank, "training on the images that golf gets, and on nothing else",
                        "all digits, loaded by this rank on its own",
                        "Whoever has all images needs no other rank: the play is about what ranks tell one another.",
                        "Take x and y as they are, and let ranks send: gradients, weights, or images.")
    worst = min(range(len(observations)), key=lambda rank: observations[rank]["mine"]["accuracy"])
    accuracy = observations[worst]["mine"]["accuracy"]
    mine, par = (sum(seen[who]["bytes"] for seen in observations) for who in ("mine", "par"))
    if accuracy < GOAL:
        raise Wrong("accuracy", worst, f"{GOAL:.0%} of the test images right on every rank",
                    f"{accuracy:.1%} on this one, with {mine:,} bytes",
                    "Each rank has a few digits only: does every rank learn of the others' before the end?",
                    "More steps, a higher rate, Adam instead of SGD: find what reaches the goal, then save bytes.")
    wrong = rows(0)
    wrong("nothing-sent", not mine and len(observations) > 1, "some bytes, sent by an operation of comm",
          f"{accuracy:.1%} without a byte",
          "No rank has all digits. From where does this one know the others', if nobody has told it?",
          "Only what travels through comm counts, and something has to.")
    score = Score(mine, par, "bytes", f"{mine:,} bytes for {accuracy:.1%}; par is {par:,}.")
    wrong("over-par", mine > par, f"at most {par:,} payload bytes, sent by all ranks together (par)",
          f"{mine:,} bytes, for {accuracy:.1%}", "Bytes = steps x bytes of a step. Larger batches need fewer steps.",
          "A step: fewer parameters, 16 bits instead of 32, several local steps before an average.",
          "All images in one batch, Adam at 0.05, half the hidden layer, tensor.half(): fewer than par.", score=score)
    slow = max(range(len(observations)), key=lambda rank: observations[rank]["mine"]["seconds"])
    if observations[slow]["mine"]["seconds"] > SLOWEST:
        raise Wrong(
            "slow", slow, f"at most {SLOWEST} s", f"{observations[slow]['mine']['seconds']:.0f} s",
            "The bytes are fine, the time is not: a small net learns digits in a few seconds, on an idle machine.",
            "Fewer steps on larger batches: forty steps on all images take a second.")
    return score


EXERCISES = {"byte-golf": Exercise("golf", observe_golf, judge_golf)}
