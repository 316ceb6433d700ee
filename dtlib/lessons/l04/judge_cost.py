"""Checks of averaged gradients by cost: reduced bytes, and number and size of buckets."""

from dtlib.lab.checks.exercise import rows
from dtlib.lessons.l04.observe_averaging import CAP, FULL, cap_of, joined_gradients

SMALL_OPERATIONS = 3  # allowed for exchanging numbers of samples
TIED = (
    "One parameter has two names here (tied weights). Its gradient is one, already summed over both uses.",
    "module.parameters() gives each parameter once; going through layers by hand gives a tied one twice.",
)


def trained(model: str):
    """Return (name, bytes) of each parameter of a model that gets a gradient, without repetitions."""
    return [(n, 8 * len(g)) for n, g in joined_gradients(model, "even", [None]).items() if g is not None]


def most_calls(model: str, cap: int) -> int:
    """Return the largest number of full buckets of ``cap`` bytes, filled from the first or from the last layer."""
    from dtlib.gradients.buckets import buckets_of

    class Sized:
        dtype = device = None

        def __init__(self, nbytes):
            self.nbytes = nbytes

    tensors = [Sized(count) for _, count in trained(model)]
    return max(len(buckets_of(order, cap, cap)) for order in (tensors, tensors[::-1]))


def judge_cost(cases) -> None:
    """Check that ranks reduce each gradient once, in buckets of the right size."""
    size, model = len(cases), cases[0]["model"]
    if size == 1:
        return
    parameters = trained(model)
    needed, largest = sum(count for _, count in parameters), max(count for _, count in parameters)
    spare = 8 * (len(parameters) + 8)  # bytes for flags and numbers of samples
    for rank, case in enumerate(cases):
        total = sum(count for _, count, _ in case["reduced"])
        if total > needed + spare:
            extra = total - needed
            tied = dict(parameters).get("inside.weight", 0)
            wrong = rows(rank)
            wrong("tied-twice", model == "awkward" and abs(extra - tied) <= spare,
                  f"{needed} bytes of gradients reduced", f"{total}: {extra} too many", *TIED)
            wrong("bytes", True, f"{needed} bytes of gradients reduced (the {model} net)", f"{total} bytes",
                  "The values are right, but more travels than gradients: frozen parameters, "
                  "unused ones, or some twice?",
                  "Take each of module.parameters() whose grad is not None, once.")
        if case["hooks"]:
            continue
        _judge_buckets(case, rank, needed, largest)


def _judge_buckets(case, rank: int, needed: int, largest: int) -> None:
    """Check that buckets are few, and not larger than allowed.

    Operations smaller than any gradient are taken as exchanges of the numbers of samples.
    """
    model, cap = case["model"], cap_of(case["kind"])
    parameters = trained(model)
    least = min(count for _, count in parameters)
    buckets = [count for _, count, _ in case["reduced"] if count >= least]
    others, bound = len(case["reduced"]) - len(buckets), most_calls(model, cap)
    big, room = max(buckets, default=0), 8 * (len(parameters) + 1)  # a bucket may include flags and samples
    expected = (
        f"at most {bound} buckets of {cap} bytes (the {model} net), so {bound} operations, and one for the samples"
    )
    wrong = rows(rank)
    if len(buckets) > bound or others > SMALL_OPERATIONS:
        wrong("full-bucket", cap == FULL, expected, f"{len(case['reduced'])} operations; with {CAP} bytes it was right",
              f"A weight and a bias have {FULL} bytes together: do they fit into a bucket of {FULL}?",
              "A new bucket begins when the next gradient would go beyond bucket_bytes: >, not >=.")
        wrong("no-buckets", True, expected, f"{len(case['reduced'])} operations",
              "The values are right, but too many messages travel: each pays latency.",
              "Put gradients into a bucket until the next would not fit, then all_reduce torch.cat of them.")
    if big <= max(cap, largest) + room:
        return
    wrong("large-not-alone", largest > cap, f"a gradient of {largest} bytes in a bucket of its own",
          f"one of {big} bytes", f"bucket_bytes is {cap} here, and one gradient is larger. What else is in its bucket?",
          "Begin a new bucket when the next gradient would go beyond bucket_bytes, however large it is itself.")
    wrong("overfull", big < needed, f"buckets of at most {cap} bytes", f"one of {big} bytes",
          "When is a bucket closed: before it goes beyond bucket_bytes, or after? And are bytes counted?",
          "if bucket and filled + gradient.nbytes > bucket_bytes: reduce it and begin a new one; then put it in.")
    wrong("one-bucket", True, f"buckets of at most {cap} bytes", f"one of {big} bytes",
          "The values are right, but nothing could travel before the last gradient is there. Is a bucket ever closed, "
          "and are bytes counted (nbytes), not numbers (numel)?",
          "Begin a new bucket when the next gradient would go beyond bucket_bytes: filled + gradient.nbytes.")
