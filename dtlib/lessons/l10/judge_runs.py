"""Lesson 10: checks of a config that fits into memory, and of the split of a batch."""

from dtlib.lab.checks.equality import whole_numbers
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.theory.zero import zero_bytes

PARAMETERS, BUDGET, BATCH, MICRO = 24_000_000, 200_000_000, 96, 8


# fits-200-mb: config


def observe_config(config, comm):
    """Return the values of the config, or the error that refuses it; nothing is trained."""
    from dtlib.errors import DtlibError
    from dtlib.training import config as configuration

    try:
        read = configuration.read(config, comm.size)
    except DtlibError as problem:
        return {"refused": str(problem)}
    scheme = "mixed_adam" if read.bf16.enabled or read.fp16.enabled else "adam"
    stage = read.zero_optimization.stage
    return {
        "stage": stage, "bytes": sum(zero_bytes(PARAMETERS, comm.size, stage, scheme).values()),
        "batch": read.train_batch_size, "steps": read.gradient_accumulation_steps,
        "micro": read.train_micro_batch_size_per_gpu, "optimizer": read.optimizer.type if read.optimizer else None,
    }


def judge_config(seen: list) -> None:
    """Check that the config fits into memory on all ranks."""
    if len(seen) < 3:
        raise Wrong("too-few", None, "three ranks, as the text says", f"{len(seen)}",
                    "On two ranks, each config that fits sends more: in bf16 stage 1 needs 240 MB. Try lab.engines(3)")
    for rank, said in enumerate(seen):
        wanted = f"batches of {BATCH}, at most {MICRO} at a time, Adam or AdamW, at most {BUDGET:,} bytes a rank"
        wrong = rows(rank, wanted)
        wrong("refused", "refused" in said, said.get("refused"), "The message has the key, and a right value.",
              "train_batch_size = micro-batch x accumulation x ranks.")
        got = f"stage {said['stage']}, {said['bytes']:,} bytes, batches of {said['batch']}, {said['micro']} at a time"
        got += f", {said['optimizer'] or 'no optimizer'}"
        wrong("another-training",
              said["batch"] != BATCH or said["micro"] > MICRO or said["optimizer"] not in ("Adam", "AdamW"), got,
              "Training must have the same result: do not change the batch or the optimizer.",
              f"Keep train_batch_size {BATCH}, and micro-batches of {MICRO} at most.")
        wrong("too-much", said["bytes"] > BUDGET, got, "Which stage shards more than this one, and does not send more?",
              "In bf16 stage 1 needs 4 + 12 / N bytes per parameter.")
        if said["stage"] == 3 or (said["stage"] == 2 and said["steps"] > 1):
            raise Wrong("sends-more", rank, "not more bytes sent than by data parallelism", got,
                        "It fits. What does this stage send for each micro-batch?",
                        "Stages 2 and 3 send for every micro-batch. Which stage sends only once per step?")


# slower-fix: places_of(step, batch, rank, ranks)

SIZES = (96, 100)


def observe_places(places_of, comm):
    """Return this rank's places for two steps of each batch size."""
    return [[whole_numbers(places_of(step, batch, comm.rank, comm.size)) for step in range(2)] for batch in SIZES]


def judge_places(seen: list) -> None:
    """Check that ranks take disjoint slices of each batch."""
    ranks = len(seen)
    for rank, places in enumerate(seen):
        if odd := [one for steps in places for one in steps if isinstance(one, str)]:
            raise Wrong("type", rank, "the positions of this rank's samples: a range, or a list of whole numbers",
                        odd[0], "Can a for loop run over your result?", "return range(...)")
    for which, batch in enumerate(SIZES):
        for step in range(2):
            _judge_slices([places[which][step] for places in seen], step, batch, ranks)


def _judge_slices(slices, step: int, batch: int, ranks: int) -> None:
    first = step * batch
    wanted = set(range(first, first + batch))
    everything = [place for one in slices for place in one]
    expected = f"step {step}, batch {batch}: about {batch / ranks:.0f} of the places {first} to {first + batch - 1}"
    for rank, one in enumerate(slices):
        if set(one) <= wanted:
            continue
        got = f"{len(one)} places, {one[:3]} ..."
        wrong = rows(rank, expected)
        wrong("other-places", len(everything) >= 1.5 * batch, got,
              "All ranks together process as many samples as one rank did before.",
              "range(step * batch + rank, (step + 1) * batch, ranks)")
        wrong("not-of-this-step", True, got, "Where does the batch of a step start, and where does it end?",
              "first = step * batch; and no position from first + batch on.")
    whole = [rank for rank, one in enumerate(slices) if ranks > 1 and set(one) == wanted]
    if whole and len(everything) > batch:
        one = slices[whole[0]]
        raise Wrong("whole-batch", whole[0], expected, f"{len(one)} places, {one[:3]} ...",
                    "How many samples does this rank compute, on two ranks?",
                    "Start at this rank, and use every N-th position.")
    if twice := sorted({place for place in everything if everything.count(place) > 1}):
        who = [rank for rank, one in enumerate(slices) if twice[0] in one]
        raise Wrong("twice", who[-1], f"step {step}, batch {batch}: each place once",
                    f"{len(twice)} occur several times: {twice[0]} on ranks {who}",
                    "A sample that is computed twice has twice the weight in the mean.",
                    "range(first + rank, first + batch, ranks): positions of one rank differ by `ranks`.")
    if lost := sorted(wanted - set(everything)):
        why = f"{ranks} does not divide {batch}." if batch % ranks else "Where does each rank start and end?"
        raise Wrong("left-out", None, f"step {step}, batch {batch}: all {batch} places",
                    f"{len(lost)} are on no rank: {lost[:3]}", why, "Slices may differ by one: use a step in range().")
    sizes = [len(one) for one in slices]
    if max(sizes) >= batch // ranks + max(2, ranks):
        raise Wrong("uneven", sizes.index(max(sizes)), expected, f"ranks have {', '.join(map(str, sizes))} places",
                    "Each position occurs once. But how long do all ranks wait for the rank with the most?",
                    "range(first + rank, first + batch, ranks) gives parts that differ by at most one.")


EXERCISES = {
    "fits-200-mb": Exercise("config", observe_config, judge_config),
    "slower-fix": Exercise("places_of", observe_places, judge_places, any_size=True),
}
