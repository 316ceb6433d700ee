"""Lesson 09: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction

_MORE = ("large samples", "small samples")

PREDICTIONS = {
    "demand-of-unet3d": Prediction(
        got=lambda: 7 * 146_600_628 / 0.636 / 1e9, tolerance=0.05, hint="Batch times bytes, over the time of a step."
    ),
    "times-the-demand": Prediction(
        got=lambda: (7 * 146_600_628 / 0.636) / (48 * 2500 / 0.968), tolerance=0.1,
        hint="BERT: 48 samples of 2500 bytes in 0.968 s.",
    ),
    "opens-of-an-epoch": Prediction(
        got=lambda opens: {"files": opens["files"], "shards": opens["shards"]},
        hint="A file a sample: an open each. 1920 samples in shards of 384.",
    ),
    "where-workers-help": Prediction(
        got=lambda gains: max(gains, key=gains.get), choices=_MORE, of_this_computer=True,
        hint="A worker saves the time of reading, and costs a message a batch.",
    ),
    "starves-more": Prediction(
        got=lambda pace: min(pace, key=lambda name: pace[name].au), choices=("slow accelerator", "fast accelerator"),
        hint="Who computes for less time waits sooner.",
    ),
    "warm-on-four-ranks": Prediction(
        got=lambda warm: "yes" if warm[0][4] < 1.2 * warm[0][1] else "no",
        choices=("yes", "no"),
        of_this_computer=True,
        hint="Four ranks copy from memory at the same time. How many cores are there?",
    ),
    "bytes-of-two-columns": Prediction(
        got=lambda part: round(part, 3), tolerance=0.3, hint="2 columns of 40, all of them 4 bytes wide."
    ),
    "state-of-resuming": Prediction(
        got=lambda saved: saved[0]["samples"], hint="Four ranks, five batches of 16 each: all of them count."
    ),
    # The exercises
    "batches-on-three-ranks": Prediction(
        got=lambda: {"steps": -(-1000 // (3 * 32)), "in the last step": 1000 % (3 * 32)},
        hint="A step takes 3 x 32 samples; what is left is the last step's.",
    ),
    "read-ahead-and-killed": Prediction(
        got=lambda: 10 * 8, hint="What workers have read ahead, nobody has trained on."
    ),
}  # fmt: skip
