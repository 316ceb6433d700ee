"""Lesson 04: averaged gradients, judged by their values against one process, and by what is reduced."""

from dtlib.lab.checks.checks import Wrong
from dtlib.lab.lessons.l04.observe_averaging import (
    CAP,
    EVEN,
    FULL,
    GOES_ON,
    MODELS,
    batch_of,
    cap_of,
    gradients_of,
    loss_of,
)

SMALL_VERBS = 3  # by which ranks may tell one another their samples


def judge(observations) -> None:
    """Every rank begins as rank 0, has the gradient of the joined batch, and reduced no more than it had to."""
    for cases in zip(*observations, strict=True):
        _judge_beginning(cases)
        _judge_values(cases, moved=any(seen[0]["moved"] for seen in observations))
    for cases in zip(*observations, strict=True):
        _judge_cost(cases)


def _judge_beginning(cases) -> None:
    if cases[0]["kind"] in GOES_ON:
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
    if all(_close(case["gradients"][n], expected[n], 1e-2) for case in cases for n in expected):
        raise Wrong(
            "rounded", rank, f"{where} in float64, as the gradients are", "nearly that: it was rounded on its way",
            "In which type does the flat tensor travel?",
            "torch.cat keeps the type of the gradients; torch.empty or torch.zeros need dtype=gradient.dtype.",
        )  # fmt: skip
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
    if kind == "regrouped":
        counts = ", ".join(f"{case['samples']}" for case in cases)
        raise Wrong(
            "weight-remembered", rank, f"{where}: the mean over all samples (the ranks have {counts} this time)",
            "another weighting, after an uneven batch that was right",
            "What was found out for one batch need not hold for the next: who has how many samples this time?",
            "Ask in every call: all_reduce the samples in average_gradients, and keep neither total nor weight.",
        )  # fmt: skip
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
    if cases[0]["hooks"]:
        raise Wrong(
            "other-values", rank, f"{where}: the gradient of the joined batch", "something else",
            "What combines the gradients of all ranks, and has every parameter that is trained a hook?",
            'In the hook of each parameter: comm.all_reduce(parameter.grad, op="mean").',
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
    ranks = len(cases)
    loss_of(net, torch.cat([batch_of(model, kind, rank, ranks) for rank in range(ranks)])).backward()
    return gradients_of(net)


def _close(came, expected, tolerance: float = 1e-9) -> bool:
    if came is None or expected is None:
        return came is expected
    largest = max(abs(value) for value in expected)
    return len(came) == len(expected) and all(
        abs(a - b) <= tolerance * largest + 1e-12 for a, b in zip(came, expected, strict=True)
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


def most_calls(model: str, cap: int) -> int:
    """Buckets of ``cap`` bytes that are filled one after the other, in either order."""
    from dtlib.gradients.flat import buckets_of

    class Sized:
        dtype = device = None

        def __init__(self, nbytes):
            self.nbytes = nbytes

    tensors = [Sized(count) for _, count in trained(model)]
    return max(len(buckets_of(order, cap, cap)) for order in (tensors, tensors[::-1]))


def _judge_cost(cases) -> None:
    size, model = len(cases), cases[0]["model"]
    if size == 1:
        return
    parameters = trained(model)
    needed, largest = sum(count for _, count in parameters), max(count for _, count in parameters)
    spare = 8 * (len(parameters) + 8)  # numbers that travel along: flags, samples
    for rank, case in enumerate(cases):
        total = sum(count for _, count, _ in case["reduced"])
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
        _judge_buckets(case, rank, needed, largest)


def _judge_buckets(case, rank: int, needed: int, largest: int) -> None:
    """As few as can be, and none that holds more than it may. What is smaller than any gradient tells the samples."""
    model, cap = case["model"], cap_of(case["kind"])
    parameters = trained(model)
    least = min(count for _, count in parameters)
    buckets = [count for _, count, _ in case["reduced"] if count >= least]
    others, bound = len(case["reduced"]) - len(buckets), most_calls(model, cap)
    big, room = max(buckets, default=0), 8 * (len(parameters) + 1)  # flags and samples may travel in a bucket
    expected = f"at most {bound} buckets of {cap} bytes (the {model} net), so {bound} verbs, and one for the samples"
    if len(buckets) > bound or others > SMALL_VERBS:
        if cap == FULL:
            raise Wrong(
                "full-bucket", rank, expected, f"{len(case['reduced'])} verbs; with {CAP} bytes it was right",
                f"A weight and a bias have {FULL} bytes together: do they fit into a bucket of {FULL}?",
                "A new bucket begins when the next gradient would go beyond bucket_bytes: >, not >=.",
            )  # fmt: skip
        raise Wrong(
            "no-buckets", rank, expected, f"{len(case['reduced'])} verbs",
            "The values are right, but too many messages travel: each pays latency.",
            "Put gradients into a bucket until the next would not fit, then all_reduce torch.cat of them.",
        )  # fmt: skip
    if big <= max(cap, largest) + room:
        return
    if largest > cap:
        raise Wrong(
            "large-not-alone", rank, f"a gradient of {largest} bytes in a bucket of its own", f"one of {big} bytes",
            f"bucket_bytes is {cap} here, and one gradient is larger. What else is in its bucket?",
            "Begin a new bucket when the next gradient would go beyond bucket_bytes, however large it is itself.",
        )  # fmt: skip
    if big < needed:
        raise Wrong(
            "overfull", rank, f"buckets of at most {cap} bytes", f"one of {big} bytes",
            "When is a bucket closed: before it goes beyond bucket_bytes, or after? And are bytes counted?",
            "if bucket and filled + gradient.nbytes > bucket_bytes: reduce it and begin a new one; then put it in.",
        )  # fmt: skip
    raise Wrong(
        "one-bucket", rank, f"buckets of at most {cap} bytes", f"one of {big} bytes",
        "The values are right, but nothing could travel before the last gradient is there.",
        "Begin a new bucket when the next gradient would go beyond bucket_bytes.",
    )  # fmt: skip
