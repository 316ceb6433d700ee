"""What is alive on a rank of ZeRO at the largest moment of each phase of a step, counted a second time."""

from collections.abc import Sequence
from dataclasses import replace

from dtlib.theory.zero import Scheme, _ceil, _checked, _shard, zero_bytes

COMPARED = 9  # flags behind a bucket: of the pass, and of values in the first passes


def zero_peak_bytes(
    buckets: Sequence[Sequence[int]], ranks: int, stage: int, scheme: str | Scheme = "mixed_adam", rank: int = 0
) -> dict[str, dict[str, int]]:
    """What is alive on a rank at the largest moment of each phase of a step, in bytes, by what it is for.

    Beside the states between steps there are:

        gathered     stage 3: the parameters of the unit that computes
        new gradients  of the bucket that fills, as autograd computes them
        bucket       a copy of them in one flat memory; at stage 0 all so far. A single gradient that the ranks divide
                     travels from its own memory at stages 2 and 3, without a copy
        in flight    the bucket before, which is received while this one fills
        shards       this rank's averages so far
        scratch      where an all-reduce receives; a reduce-scatter receives where its shard will be
        float32      copies of 16-bit gradients for the master weights, one parameter after the other

    Between steps gradients have no memory, except at stage 1, which keeps all of it. Activations, and temporaries of
    an optimizer's step (a fused one has none), are not in it; nor is what has arrived earlier than it must.

    Args:
        buckets: sizes of parameters, by bucket (at stage 3 by unit), in the order of the backward pass.
        ranks, stage, scheme, rank: as for ``zero_bytes``.
    """
    sizes = [sum(bucket) for bucket in buckets]
    flat = sizes if stage >= 2 else [sum(sizes)]
    scheme, _, _ = _checked(flat, ranks, stage, scheme, ())
    g, padded, shards = scheme.gradients, [_ceil(n, ranks) * ranks for n in sizes], [_ceil(n, ranks) for n in sizes]
    states = zero_bytes(flat, ranks, stage, scheme if stage == 1 else replace(scheme, gradients=0), rank)
    flags = [sum(bucket) + len(bucket) + COMPARED for bucket in buckets]  # data parallelism's buckets, with their flags
    backward, step = [], []
    for i, bucket in enumerate(buckets):
        if stage == 0:
            scratch = flags[0] if i else 0
            backward.append({"new gradients": g * sizes[i], "bucket": g * sum(flags[: i + 1]), "scratch": g * scratch})
        elif stage == 1:
            backward.append({"new gradients": g * max(bucket)})
        else:
            fills = {"new gradients": g * sizes[i], "shards": g * sum(shards[:i])}
            gathered = {"gathered": scheme.parameters * padded[i]} if stage == 3 else {}
            flying = {"in flight": g * padded[i - 1], "shards": g * sum(shards[:i])} if i else {}
            backward.append({**fills, **gathered, **flying})
            if len(bucket) > 1 or padded[i] > sizes[i]:
                backward.append({**fills, "bucket": g * padded[i]})
            backward.append({"in flight": g * padded[i], "shards": g * sum(shards[: i + 1])})
    if stage == 0:
        backward.append({"bucket": g * sum(flags), "scratch": g * max(flags)})
    name, all_sent = ("bucket", sum(flags)) if stage == 0 else ("shards", sum(_ceil(n, ranks) for n in flat))
    step.append({name: g * all_sent})
    copied = sizes if stage == 0 else [_shard(n, ranks, rank) for n in flat]
    for i in reversed(range(len(copied))) if scheme.master_weights and g < 4 else ():  # the first layer first
        left = {0: sum(flags[: i + 1]), 1: 0, 2: sum(shards), 3: sum(shards[: i + 1])}[stage]
        step.append({name: g * left, "float32": 4 * sum(copied[i:])})
    forward = [{"gathered": scheme.parameters * max(padded) if stage == 3 else 0}]
    moments = {"forward": forward, "backward": backward, "step": step}
    return {phase: states | sorted(some, key=lambda terms: sum(terms.values()))[-1] for phase, some in moments.items()}
