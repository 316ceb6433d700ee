"""Checks of averaged gradients by cost: reduced bytes, and number and size of buckets."""

from dtlib.lab.checks.exercise import rows
from dtlib.lessons.l04.observe_averaging import CAP, FULL, cap_of, joined_gradients

SMALL_OPERATIONS = 3  # allowed for exchanging numbers of samples
TIED = (
    "One parameter has two names here (tied weights). How often do you reduce its gradient?",
    "Its gradient already contains both uses. module.parameters() returns each parameter once.",
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
                  "The values are right, but you send too much: frozen or unused parameters, or some twice?",
                  "Reduce each of module.parameters() with a grad that is not None, once.")
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
              f"A weight and a bias have {FULL} bytes together. Do they fit into a bucket of {FULL}?",
              "Start a new bucket when the next gradient would exceed bucket_bytes: >, not >=.")
        wrong("no-buckets", True, expected, f"{len(case['reduced'])} operations",
              "The values are right, but each message costs latency. How can you send fewer messages?",
              "Fill a bucket until the next gradient does not fit, then all_reduce torch.cat of its gradients.")
    if big <= max(cap, largest) + room:
        return
    wrong("large-not-alone", largest > cap, f"a gradient of {largest} bytes in a separate bucket",
          f"a bucket of {big} bytes",
          f"bucket_bytes is {cap} here, and one gradient is larger. What else is in its bucket?",
          "Start a new bucket when the next gradient would exceed bucket_bytes, also if it is larger itself.")
    wrong("overfull", big < needed, f"buckets of at most {cap} bytes", f"a bucket of {big} bytes",
          "When do you close a bucket: before it exceeds bucket_bytes, or after? Do you count bytes?",
          "if bucket and filled + gradient.nbytes > bucket_bytes: reduce it and start a new one; then append.")
    wrong("one-bucket", True, f"buckets of at most {cap} bytes", f"a bucket of {big} bytes",
          "The values are right, but no message can start before the last gradient is ready. When do you close a "
          "bucket? Do you count bytes (nbytes) or numbers (numel)?",
          "Start a new bucket when filled + gradient.nbytes would exceed bucket_bytes.")
