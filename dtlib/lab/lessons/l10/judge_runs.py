"""Lesson 10: a config that fits, a batch that is dealt out, and a workload of one's own."""

from dtlib.lab.checks.exercise import Exercise, Wrong
from dtlib.theory.zero import zero_bytes

PARAMETERS, BUDGET, BATCH, MICRO = 24_000_000, 200_000_000, 96, 8


# fits-200-mb: config


def observe_config(config, comm):
    """What the config says, or the sentence by which it is refused; nothing is trained."""
    from dtlib.errors import DtlibError
    from dtlib.training import config as configuration

    try:
        read = configuration.read(config, comm.size, rank=1)
    except DtlibError as problem:
        return {"refused": str(problem)}
    scheme = "mixed_adam" if read.bf16.enabled or read.fp16.enabled else "adam"
    stage = read.zero_optimization.stage
    return {
        "stage": stage, "bytes": sum(zero_bytes(PARAMETERS, comm.size, stage, scheme).values()),
        "batch": read.train_batch_size, "steps": read.gradient_accumulation_steps,
        "micro": read.train_micro_batch_size_per_gpu, "optimizer": read.optimizer.type if read.optimizer else None,
    }  # fmt: skip


def judge_config(seen: list) -> None:
    for rank, said in enumerate(seen):
        wanted = f"batches of {BATCH}, at most {MICRO} at a time, Adam or AdamW, at most {BUDGET:,} bytes a rank"
        if "refused" in said:
            raise Wrong(
                "refused", rank, wanted, said["refused"], "The sentence has the key and what would be right.",
                "train_batch_size = micro-batch x accumulation x ranks.",
            )  # fmt: skip
        came = f"stage {said['stage']}, {said['bytes']:,} bytes, batches of {said['batch']}, {said['micro']} at a time"
        if said["batch"] != BATCH or said["micro"] > MICRO or said["optimizer"] not in ("Adam", "AdamW"):
            raise Wrong(
                "another-training", rank, wanted, came, "What is learnt must stay the same: batch and optimizer.",
                f"Keep train_batch_size {BATCH}, and micro-batches of {MICRO} at most.",
            )  # fmt: skip
        if said["bytes"] > BUDGET:
            raise Wrong(
                "too-much", rank, wanted, came, "Bytes a parameter times 24 million: lesson 06 has the formula.",
                "In bf16 stage 1 holds 4 + 12 / N bytes a parameter.",
            )  # fmt: skip
        if said["stage"] == 3 or (said["stage"] == 2 and said["steps"] > 1):
            raise Wrong(
                "sends-more", rank, "no more bytes sent than data parallelism sends", came,
                "It fits. What does this stage send for each micro-batch?",
                "Stage 2 sends gradients after every micro-batch, stage 3 gathers for each: which stage waits?",
            )  # fmt: skip


# slower-mend: places_of(step, batch, rank, ranks)

SIZES = (96, 100)


def observe_places(places_of, comm):
    return [[[int(p) for p in places_of(step, batch, comm.rank, comm.size)] for step in range(2)] for batch in SIZES]


def judge_places(seen: list) -> None:
    ranks = len(seen)
    for which, batch in enumerate(SIZES):
        for step in range(2):
            slices = [places[which][step] for places in seen]
            wanted = set(range(step * batch, (step + 1) * batch))
            where = f"the places {step * batch} to {(step + 1) * batch - 1}"
            everything = [place for one in slices for place in one]
            expected = f"step {step}, batch {batch}: about {batch / ranks:.0f} of {where}"
            strange = [rank for rank, one in enumerate(slices) if not set(one) <= wanted]
            if strange:
                one = slices[strange[0]]
                raise Wrong(
                    "other-places", strange[0], expected, f"{len(one)} places, {one[:3]} ...",
                    "The step has as many samples as on one rank.",
                    "range(step * batch + rank, (step + 1) * batch, ranks)",
                )  # fmt: skip
            if ranks > 1 and set(slices[0]) == wanted:
                raise Wrong(
                    "whole-batch", 0, expected, f"{len(slices[0])} places, {slices[0][:3]} ...",
                    "How many samples does this rank compute, on two ranks?",
                    "Each rank takes every N-th place, from its own rank on.",
                )  # fmt: skip
            if len(everything) != len(set(everything)):
                twice = len(everything) - len(set(everything))
                raise Wrong(
                    "twice", 0, f"step {step}: no place on two ranks", f"{twice} twice",
                    "A sample that two ranks have counts twice in the mean.",
                    "Places that differ by `ranks` belong together.",
                )  # fmt: skip
            if set(everything) != wanted:
                lost = len(wanted - set(everything))
                raise Wrong(
                    "left-out", 0, f"batch {batch}: all {batch} places", f"{lost} are on no rank",
                    "100 does not divide by 3.", "Slices may differ by one: use a step in range().",
                )  # fmt: skip


# wrap-a-model: my_workload(config)


def observe_workload(my_workload, comm):
    """Its parts, and twenty-five steps of it."""
    import torch

    from dtlib.training.run import train
    from dtlib.workloads.workload import Workload

    work = my_workload({})
    if not isinstance(work, Workload):
        return {"kind": type(work).__name__}
    collate = work.collate or torch.utils.data.default_collate
    x, y = collate([work.train[place] for place in range(12)])
    outputs = work.model(x).detach()
    whole = float(work.loss_fn(outputs, y))
    halves = [float(work.loss_fn(outputs[half], y[half])) for half in (slice(0, 4), slice(4, 12))]
    config = {
        "train_batch_size": 24 * comm.size, "run": {"steps": 25},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }  # fmt: skip
    result = train(lambda own: my_workload({}), config, comm=comm)
    same = work.evaluate(work.model, comm)
    with torch.no_grad():
        guesses = work.model(torch.stack([work.test[i][0] for i in range(len(work.test))])).argmax(1)
    labels = torch.stack([torch.as_tensor(work.test[i][1]) for i in range(len(work.test))])
    return {
        "kind": "Workload", "shape": list(outputs.shape), "whole": whole, "mean": (4 * halves[0] + 8 * halves[1]) / 12,
        "first": result["losses"][0], "last": sum(result["losses"][-5:]) / 5, "accuracy": same.get("accuracy"),
        "expected": float((guesses == labels).double().mean()),
    }  # fmt: skip


def judge_workload(seen: list) -> None:
    for rank, it in enumerate(seen):
        if it["kind"] != "Workload":
            raise Wrong(
                "no-workload", rank, "a Workload", f"a {it['kind']}", "What does the function return?",
                "return Workload(name=..., model=..., ...)",
            )  # fmt: skip
        if it["shape"] != [12, 10]:
            raise Wrong(
                "shape", rank, "outputs (12, 10) for 12 images", f"outputs {tuple(it['shape'])}",
                "Ten classes, so ten scores an image.", "The last layer is nn.Linear(..., 10).",
            )  # fmt: skip
        if abs(it["whole"] - it["mean"]) > 1e-4 * max(1, abs(it["whole"])):
            raise Wrong(
                "no-mean", rank, f"a mean over samples: {it['mean']:.4f} from two halves", f"{it['whole']:.4f}",
                "Ranks average what each computes of its slice: of what must the loss be a mean?",
                "cross_entropy has reduction='mean' by default.",
            )  # fmt: skip
        if it["accuracy"] is None or abs(it["accuracy"] - it["expected"]) > 1e-9:
            came = "no `accuracy`" if it["accuracy"] is None else f"{it['accuracy']:.4f}"
            raise Wrong(
                "accuracy", rank, f"accuracy {it['expected']:.4f}, of all test images", came,
                "Each rank may look at a slice, but all ranks return the figure of the whole.",
                "comm.all_reduce(torch.tensor([right, seen])), then divide.",
            )  # fmt: skip
        if not it["last"] < 0.7 * it["first"]:
            raise Wrong(
                "does-not-learn", rank, "a loss that falls by a third in 25 steps",
                f"{it['first']:.3f} at first, {it['last']:.3f} at last", "Do images and labels belong together?",
                "Has a layer ReLU where scores come out, or are parameters missing in the model?",
            )  # fmt: skip


EXERCISES = {
    "fits-200-mb": Exercise("config", observe_config, judge_config),
    "slower-mend": Exercise("places_of", observe_places, judge_places, any_size=True),
    "wrap-a-model": Exercise("my_workload", observe_workload, judge_workload),
}
