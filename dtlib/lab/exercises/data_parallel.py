"""Lesson 04: averaged gradients, judged by their values against one process, and by what is reduced; and byte golf."""

import re
import time

from dtlib.lab.checks import Wrong

EVEN = 4  # samples a rank, where all have as many
WIDTH = 6
CAP = 600  # bytes of a bucket
GOAL = 0.95  # accuracy in byte golf
SLOWEST = 30  # seconds for it
_SHAPE = re.compile(r"of \(([\d, ]*)\) (\w+)$")
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}


# What is observed


def plain(seed: int):
    """Five layers: ten parameters in a few buckets."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def awkward(seed: int):
    """What real models have: tied weights, a frozen layer, an unused one, and a buffer."""
    import torch
    from torch import nn

    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(10, 10)
            self.frozen = nn.Linear(10, 10).requires_grad_(False)
            self.unused = nn.Linear(7, 3)
            self.outside = nn.Linear(10, 10, bias=False)
            self.outside.weight = self.inside.weight  # tied
            self.register_buffer("shift", torch.randn(10))

        def forward(self, x):
            return self.outside(torch.tanh(self.frozen(self.inside(x)))) + self.shift

    torch.manual_seed(seed)
    return Awkward().double()


MODELS = {"plain": plain, "awkward": awkward}
WIDTHS = {"plain": WIDTH, "awkward": 10}
CASES = (("plain", "even"), ("plain", "again"), ("awkward", "even"), ("plain", "uneven"))


def samples_of(rank: int, kind: str) -> int:
    return 2 * rank + 1 if kind == "uneven" else EVEN


def _batch(model: str, kind: str, rank: int):
    """The samples of a rank, the same wherever they are made."""
    import torch

    seed = 100 + rank + 50 * (kind == "again")
    return torch.randn(
        samples_of(rank, kind), WIDTHS[model], dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def _loss(net, x):
    return (net(x) - 1).square().mean()


def _gradients(net) -> dict:
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in net.named_parameters()}


def observe_hooks(wrap, comm):
    """``wrap(comm, module)`` has broadcast and set hooks; after ``backward()`` gradients are averaged."""
    return _observe(wrap, comm, hooks=True)


def observe_buckets(cls, comm):
    """``cls(comm, module, bucket_bytes)``; after ``average_gradients(samples)`` gradients are averaged."""

    return _observe(lambda comm, module: cls(comm, module, CAP), comm, hooks=False)


def _observe(wrap, comm, hooks):
    from dtlib.comm.recorder import recording

    cases = []
    nets = {}
    for model, kind in CASES:
        if hooks and kind == "uneven":
            continue
        if kind != "again":
            net = MODELS[model](seed=comm.rank)  # other values on every rank
            nets[model] = net, wrap(comm, net)
        net, wrapped = nets[model]
        x = _batch(model, kind, comm.rank)
        case = {"model": model, "kind": kind, "hooks": hooks, "samples": len(x)}
        case["begins"] = {name: tensor.flatten().tolist() for name, tensor in net.state_dict().items()}
        net.zero_grad()
        local = MODELS[model](seed=comm.rank)
        local.load_state_dict(net.state_dict())
        _loss(local, x).backward()
        case["local"] = _gradients(local)
        with recording() as events:
            _loss(net, x).backward()
            if not hooks:
                wrapped.average_gradients(len(x))
        case["gradients"] = _gradients(net)
        case["reduced"] = [_reduced(event) for event in events if event.kind == "verb"]
        cases.append(case)
    cases[0]["moved"] = _moved(*nets["plain"], comm, hooks)
    return cases


def _reduced(event) -> tuple[str, int, int]:
    """Verb, bytes of its array, and bytes that this rank sent for it."""
    match = _SHAPE.search(event.what)
    if not match:
        return event.name, 0, event.bytes
    count = 1
    for length in match[1].split(","):
        count *= int(length) if length.strip() else 1
    return event.name, count * _BYTES.get(match[2], 8), event.bytes


def _moved(net, wrapped, comm, hooks) -> bool:
    """True if averaging changes parameters: they are set apart, and must stay so."""
    import torch

    with torch.no_grad():
        for parameter in net.parameters():
            parameter += comm.rank
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net.zero_grad()
    _loss(net, _batch("plain", "even", comm.rank)).backward()
    if not hooks:
        wrapped.average_gradients(EVEN)
    return any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


# How it is judged


def judge(observations) -> None:
    """Every rank begins as rank 0, has the gradient of the joined batch, and reduced no more than it had to."""
    for cases in zip(*observations, strict=True):
        _judge_beginning(cases)
        _judge_values(cases, moved=any(seen[0]["moved"] for seen in observations))
    for cases in zip(*observations, strict=True):
        _judge_cost(cases)


def _judge_beginning(cases) -> None:
    if cases[0]["kind"] == "again":
        return
    truth = {name: tensor.flatten().tolist() for name, tensor in MODELS[cases[0]["model"]](seed=0).state_dict().items()}
    for rank, case in enumerate(cases):
        for name, expected in truth.items():
            if case["begins"][name] == expected:
                continue
            what = f"{name}, of the {case['model']} net: rank 0's values on every rank"
            if name == "shift":
                raise Wrong(
                    "buffers-not-broadcast", rank, what, "other values: a buffer of this rank's own",
                    "state_dict() has more than parameters: what else does the output depend on?",
                    "Broadcast module.buffers() as well as module.parameters(), from rank 0.",
                )  # fmt: skip
            if name.startswith("frozen"):
                raise Wrong(
                    "frozen-not-broadcast", rank, what, "this rank's own values, in a layer that is frozen",
                    "A layer that is not trained is used all the same.",
                    "Broadcast all of module.parameters(), whether they require a gradient or not.",
                )  # fmt: skip
            raise Wrong(
                "not-broadcast", rank, what, "other values",
                "Ranks begin with different weights here. With the same gradients they stay different.",
                "Before anything else: comm.broadcast(tensor) for each parameter and buffer.",
            )  # fmt: skip


def _judge_values(cases, moved: bool) -> None:
    size, model, kind = len(cases), cases[0]["model"], cases[0]["kind"]
    expected = _expected(model, kind, cases)
    wrong = {}  # rank -> names
    for rank, case in enumerate(cases):
        names = [name for name in expected if not _close(case["gradients"][name], expected[name])]
        if names:
            wrong[rank] = names
    if not wrong and not moved:
        return
    rank = min(wrong, default=0)
    name = wrong[rank][0] if wrong else ""
    gradients = cases[rank]["gradients"]
    where = f"{name}.grad of the {model} net on {size} ranks"
    calls = sum(verb != "broadcast" for verb, *_ in cases[rank]["reduced"])
    if moved:
        raise Wrong(
            "parameter-reduced", rank, "parameters as before, and gradients averaged", "parameters were averaged",
            "Is it the parameter that travels, or its gradient? The loss may go down all the same.",
            "Pass parameter.grad to comm.all_reduce, not parameter or parameter.data.",
        )  # fmt: skip
    unused = [n for n in wrong[rank] if expected[n] is None]
    if unused:
        raise Wrong(
            "unused", rank, f"{unused[0]}.grad is None, as in one process", "a gradient",
            "An optimizer with momentum or weight decay moves a parameter whose gradient is zero, and skips None.",
            "Leave out parameters whose grad is None.",
        )  # fmt: skip
    if any(gradients[n] is None for n in wrong[rank]):
        name = next(n for n in wrong[rank] if gradients[n] is None)
        raise Wrong("gradient-lost", rank, f"{name}.grad", "None", "Write the average back to parameter.grad.")
    if kind == "again":
        raise Wrong(
            "second-step", rank, f"{where} in the second step", "something else, after a first step that was right",
            "What is left over from the first step? After zero_grad() parameter.grad is another tensor, or None.",
            "Look up parameter.grad in each step anew.",
        )  # fmt: skip
    everywhere = [(r, n) for r in range(size) for n in expected if expected[n] is not None]
    if all(_close(cases[r]["gradients"][n], cases[r]["local"][n]) for r, n in everywhere):
        came = f"each rank's own gradient, although {calls} verbs ran" if calls else "each rank's own gradient"
        raise Wrong(
            "not-averaged", rank, f"{where}: the same on all ranks", came,
            "Does what was averaged find its way back into parameter.grad?" if calls else "Who averages?",
            "all_reduce works in place: on a copy, such as torch.cat makes, copy the parts back: grad.copy_(part).",
        )  # fmt: skip
    ratios = {(r, n): _ratio(cases[r]["gradients"][n], expected[n]) for r, n in everywhere}
    tied = [(r, n) for r, n in everywhere if n == "inside.weight"]
    if model == "awkward" and all(ratios[pair] == 1 for pair in everywhere if pair not in tied):
        raise Wrong("tied-twice", rank, f"{where}, once", _times(ratios[tied[0]]), *_TIED)
    same = set(ratios.values())
    ratio = same.pop() if len(same) == 1 else None
    if kind == "uneven":
        _judge_weights(cases, rank, where, ratio, everywhere)
    if ratio in (size, size * EVEN):
        raise Wrong(
            "not-divided", rank, f"{where}: the mean over all samples", _times(ratio),
            "A sum over ranks is as a learning rate that grows with their number.",
            'Average: op="mean", or divide by comm.size once.',
        )  # fmt: skip
    if ratio in (1 / size, 1 / size / EVEN, 1 / size**2):
        raise Wrong(
            "divided-twice", rank, f"{where}: the mean over all samples", _times(ratio),
            'It is divided more than once: op="mean" divides already.',
            'Use op="sum" and divide by comm.size, or op="mean" alone.',
        )  # fmt: skip
    raise Wrong(
        "other-values", rank, f"{where}: the gradient of the joined batch", "something else",
        "Are the parts copied back to the parameters that they came from, in the same order on all ranks?",
    )  # fmt: skip


_TIED = (
    "One parameter has two names here (tied weights). Its gradient is one, already summed over both uses.",
    "module.parameters() gives each parameter once; going through layers by hand gives a tied one twice.",
)


def _judge_weights(cases, rank, where, ratio, everywhere) -> None:
    size = len(cases)
    mean = {
        n: [sum(column) / size for column in zip(*(case["local"][n] for case in cases), strict=True)]
        for n in {n for _, n in everywhere}
    }
    counts = ", ".join(f"{case['samples']}" for case in cases)
    expected = f"{where}: the mean over all samples (the ranks have {counts})"
    if all(_close(cases[r]["gradients"][n], mean[n]) for r, n in everywhere):
        raise Wrong(
            "unweighted", rank, expected, "the mean over ranks: each counts alike, whatever its number of samples",
            "A rank with one sample and one with five: should their gradients count alike?",
            "Multiply by samples / (all ranks' samples), and sum. Who knows the samples of all? An all_reduce.",
        )  # fmt: skip
    raise Wrong(
        "weights", rank, expected, "another weighting" if ratio is None else _times(ratio),
        "Even batches come out right, uneven ones do not. Do the ranks' weights add up to 1?",
        "This rank's weight is samples / total, where total is the all_reduce of samples; then sum.",
    )  # fmt: skip


def _expected(model, kind, cases) -> dict:
    """The gradient that one process has on the batches of all ranks."""
    import torch

    net = MODELS[model](seed=0)
    _loss(net, torch.cat([_batch(model, kind, rank) for rank in range(len(cases))])).backward()
    return _gradients(net)


def _close(came, expected) -> bool:
    if came is None or expected is None:
        return came is expected
    largest = max(abs(value) for value in expected)
    return len(came) == len(expected) and all(
        abs(a - b) <= 1e-6 * largest + 1e-12 for a, b in zip(came, expected, strict=True)
    )


def _ratio(came, expected):
    """``came / expected`` if that is one number, rounded; else None."""
    product = sum(a * b for a, b in zip(came, expected, strict=True))
    ratio = product / sum(b * b for b in expected)
    if not _close(came, [ratio * b for b in expected]):
        return None
    for whole in range(1, 200):
        for known in (whole, 1 / whole):
            if abs(ratio / known - 1) < 1e-6:
                return known
    return ratio


def _times(ratio) -> str:
    return "something else" if ratio is None else f"{ratio:.4g} times as much"


def trained(model: str):
    """The parameters of a model that get a gradient, as (name, bytes), each once."""
    return [(n, 8 * len(g)) for n, g in _expected(model, "even", [None]).items() if g is not None]


def most_calls(model: str) -> int:
    """Buckets that are filled one after the other, in either order."""
    from dtlib.flat import buckets_of

    class Sized:
        dtype = device = None

        def __init__(self, nbytes):
            self.nbytes = nbytes

    tensors = [Sized(count) for _, count in trained(model)]
    return max(len(buckets_of(order, CAP, CAP)) for order in (tensors, tensors[::-1]))


def _judge_cost(cases) -> None:
    size, model = len(cases), cases[0]["model"]
    if size == 1:
        return
    parameters = trained(model)
    needed, largest = sum(count for _, count in parameters), max(count for _, count in parameters)
    spare = 8 * (len(parameters) + 8)  # numbers that travel along: flags, samples
    for rank, case in enumerate(cases):
        calls, total = len(case["reduced"]), sum(count for _, count, _ in case["reduced"])
        if total > needed + spare:
            extra = total - needed
            tied = dict(parameters).get("inside.weight", 0)
            if model == "awkward" and abs(extra - tied) <= spare:
                raise Wrong(
                    "tied-twice", rank, f"{needed} bytes of gradients reduced", f"{total}: {extra} too many", *_TIED
                )
            raise Wrong(
                "bytes", rank, f"{needed} bytes of gradients reduced (the {model} net)", f"{total} bytes",
                "The values are right, but more travels than gradients: frozen parameters, unused ones, or some twice?",
                "Take each of module.parameters() whose grad is not None, once.",
            )  # fmt: skip
        if case["hooks"]:
            continue
        bound = most_calls(model)
        if calls > bound + 1:
            raise Wrong(
                "no-buckets", rank, f"at most {bound} buckets of {CAP} bytes (the {model} net), so {bound} verbs, and "
                "one for the samples", f"{calls} verbs",
                "The values are right, but too many messages travel: each pays latency.",
                "Put gradients into a bucket until the next would not fit, then all_reduce torch.cat of them.",
            )  # fmt: skip
        big = max((count for _, count, _ in case["reduced"]), default=0)
        if big > max(CAP, largest) + spare:
            raise Wrong(
                "one-bucket", rank, f"buckets of at most {CAP} bytes", f"one of {big} bytes",
                "The values are right, but nothing could travel before the last gradient is there.",
                "Begin a new bucket when the next gradient would go beyond bucket_bytes.",
            )  # fmt: skip


# Byte golf


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
        for parameter, part in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True):
            parameter.grad = part.view_as(parameter).float()
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

    from dtlib.comm.recorder import recording

    began = time.monotonic()
    with recording() as events:
        model = train(comm, x, y)
    seconds = time.monotonic() - began
    if not callable(model):
        return {"error": f"{model!r:.60}"}
    with torch.no_grad():
        said = model(x_test)
    if not isinstance(said, torch.Tensor) or said.shape[:1] != y_test.shape:
        return {"error": f"a model that returns {said!r:.60} for {len(x_test)} images"}
    said = said.argmax(1) if said.ndim == 2 else said
    right = (said == y_test).double().mean().item()
    sent = sum(event.bytes for event in events if event.kind == "verb")
    return {"accuracy": right, "bytes": sent, "seconds": seconds}


def judge_golf(observations) -> str:
    """At least 95 % on every rank, in 30 s, and no more bytes than par; returns the score."""
    for rank, seen in enumerate(observations):
        if "error" in seen["mine"]:
            raise Wrong(
                "type", rank, "a function of images that returns digits, or a score for each digit",
                seen["mine"]["error"], "Return the net: `return net`.",
            )  # fmt: skip
    worst = min(range(len(observations)), key=lambda rank: observations[rank]["mine"]["accuracy"])
    accuracy = observations[worst]["mine"]["accuracy"]
    mine, par = (sum(seen[who]["bytes"] for seen in observations) for who in ("mine", "par"))
    if accuracy < GOAL:
        raise Wrong(
            "accuracy", worst, f"{GOAL:.0%} of the test images right on every rank",
            f"{accuracy:.1%} on this one, with {mine:,} bytes",
            "Each rank has a few digits only: does every rank learn of the others' before the end?",
            "More steps, a higher rate, Adam instead of SGD: find what reaches the goal, then save bytes.",
        )  # fmt: skip
    slow = max(range(len(observations)), key=lambda rank: observations[rank]["mine"]["seconds"])
    if observations[slow]["mine"]["seconds"] > SLOWEST:
        raise Wrong(
            "slow", slow, f"at most {SLOWEST} s", f"{observations[slow]['mine']['seconds']:.0f} s",
            "A small net learns digits in a few seconds.",
        )  # fmt: skip
    if mine > par:
        raise Wrong(
            "over-par", 0, f"at most {par:,} payload bytes, sent by all ranks together (par)",
            f"{mine:,} bytes, for {accuracy:.1%}",
            "Bytes = steps x bytes of a step. Larger batches need fewer steps.",
            "A step: fewer parameters, 16 bits instead of 32, several local steps before an average.",
            "All images in one batch, Adam at 0.05, half the hidden layer, tensor.half(): fewer than par.",
        )  # fmt: skip
    return f"{mine:,} bytes for {accuracy:.1%}; par is {par:,}."
