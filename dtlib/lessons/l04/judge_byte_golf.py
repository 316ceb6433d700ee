"""Lesson 04, byte golf: ranks with few digits each learn all digits, with as few bytes as possible."""

import builtins
import io
import math
import signal
from contextlib import contextmanager

from dtlib.errors import DtlibError
from dtlib.lab.checks.exercise import Exercise, Score, Wrong, rows

GOAL = 0.95  # accuracy
SLOWEST = 30  # seconds


def shard(rank: int, size: int):
    """Return a rank's training images, sorted by digit so that a rank lacks most digits, and the test set."""
    import torch

    from dtlib.lab import digits

    (x, y), test = digits.load()
    order = torch.argsort(y, stable=True)[len(y) * rank // size : len(y) * (rank + 1) // size]
    return x[order], y[order], test


def reference(comm, x, y):
    """Train the reference: forty steps on all images, with gradients in float16."""
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
    """Return accuracy, payload bytes and seconds on this rank, of the answer and of the reference."""
    import torch
    import torch._dynamo  # now, because the first optimizer imports it, which takes seconds

    def stop(*_):
        raise TimeoutError(f"golf still ran after {SLOWEST} seconds")

    comm.time_limit = SLOWEST / 2  # so that a hang raises an error before the alarm
    before = signal.signal(signal.SIGALRM, stop)  # for loops without communication
    seen = {}
    try:
        for who, function in (("par", reference), ("mine", train)):
            x, y, (x_test, y_test) = shard(comm.rank, comm.size)
            torch.manual_seed(0)
            signal.setitimer(signal.ITIMER_REAL, SLOWEST * (who == "mine"))
            seen[who] = _played(function, comm, x, y, x_test, y_test)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return seen


def _played(train, comm, x, y, x_test, y_test) -> dict:
    import torch

    from dtlib.comm.watch.recorder import recording

    names = getattr(train, "__globals__", {})
    used = [names.get(name) for name in getattr(getattr(train, "__code__", None), "co_names", ())]
    loads = [each for each in used if isinstance(each, torch.Tensor) and each.numel() > x.numel()]
    with recording() as events, loads_noticed(names, loads):
        model = train(comm, x, y)
    if any(event.algorithm == "mpi4py" for event in events):
        raise DtlibError("MPI does not report the bytes of mpi4py's collectives: use comm, or torch.distributed.")
    if not callable(model):
        return {"error": f"{model!r:.60}"}
    with torch.no_grad():
        said = model(x_test)
    if not isinstance(said, torch.Tensor) or said.shape[:1] != y_test.shape:
        return {"error": f"a model that returns {said!r:.60} for {len(x_test)} images"}
    said = said.argmax(1) if said.ndim == 2 else said
    right = said == y_test
    sent = sum(event.bytes for event in events if event.kind == "operation")
    unknown = [digit for digit in range(10) if not right[y_test == digit].any()]
    return {"right": int(right.sum()), "images": len(right), "unknown": unknown, "bytes": sent, "loads": len(loads)}


@contextmanager
def loads_noticed(names: dict, loads: list):
    """Return a context that appends to ``loads`` whenever all digits are loaded.

    It notices dtlib's functions, and any opened file of digits, as scikit-learn's function opens one. ``names`` is the
    namespace of the answer, which may have imported a function under its own name.
    """
    from dtlib.lab import digits
    from dtlib.workloads import digits as every_image

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
        yield
    finally:
        builtins.open = io.open = open_
        for space, name, load in places:
            space[name] = load


def judge_golf(observations) -> Score:
    """Check 95 % accuracy on every rank within 30 s, and no more bytes than par; return the score."""
    for rank, seen in enumerate(observations):
        if "error" in seen["mine"]:
            raise Wrong("type", rank, "a function of images that returns digits, or a score for each digit",
                        seen["mine"]["error"],
                        "On every rank, the check calls what golf returned, with test images. What do you return?",
                        "Return the net: `return net`, as the last line.")
    for rank, seen in enumerate(observations):
        if seen["mine"]["loads"]:
            raise Wrong("loads-digits", rank, "training only on the images that golf receives",
                        "all digits, or more than its share, loaded by this rank",
                        "A rank with all images needs no other rank. Which images may this rank use?",
                        "Use only x and y, and let ranks exchange data: gradients, weights, or images.")
    worst = min(range(len(observations)), key=lambda rank: observations[rank]["mine"]["right"])
    right, images, unknown = (observations[worst]["mine"][name] for name in ("right", "images", "unknown"))
    accuracy = right / images
    mine, par = (sum(seen[who]["bytes"] for seen in observations) for who in ("mine", "par"))
    if accuracy < GOAL:
        own = {*unknown} & {*shard(worst, len(observations))[1].tolist()}
        raise Wrong("accuracy", worst, f"{math.ceil(GOAL * images)} of {images} test images right on every rank",
                    f"{right} on this one, with {mine:,} bytes", *[
                        f"It never answers {', '.join(map(str, unknown))}: " + (
                            "not even its own digits. Is the rate too high, or do the networks differ between ranks?"
                            if own else "does this rank learn from the digits of the other ranks?")
                    ][: len(unknown)],
                    "More steps, a higher rate, Adam instead of SGD: first reach the goal, then save bytes.")
    wrong = rows(0)
    wrong("nothing-sent", not mine and len(observations) > 1, "some bytes, sent by an operation of comm",
          f"{accuracy:.1%} without a byte",
          "comm sent nothing, but this rank knows the digits of other ranks. How did it learn them?",
          "Exchange all data through comm: only those bytes count.")
    score = Score(mine, par, "bytes", f"{mine:,} bytes for {accuracy:.1%}; par is {par:,}.")
    wrong("over-par", mine > par, f"at most {par:,} payload bytes, sent by all ranks together (par)",
          f"{mine:,} bytes, for {accuracy:.1%}", "Bytes = steps x bytes per step. Do larger batches need fewer steps?",
          "Bytes per step: fewer parameters, 16 bits instead of 32, several local steps before an average.",
          "All images in one batch, Adam at 0.05, hidden=32, 40 steps, tensor.half(): exactly par.", score=score)
    return score


EXERCISES = {"byte-golf": Exercise("golf", observe_golf, judge_golf)}
