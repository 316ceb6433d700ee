"""The words of the course, each with the lesson that explains it: ``python -m docs.glossary`` writes the page."""

import re
from pathlib import Path

from dtlib.lab.lesson_files import name_of, notebooks
from dtlib.lab.navigation import is_lecture

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "glossary.md"
# word: (what it means, the lesson that explains it)
TERMS = {
    "1F1B": ("a pipeline's order: one forward, one backward in turn, so that few activations are held", "07"),
    "accumulation": ("adding up the gradients of several small batches before one step", "04"),
    "activation": ("what a layer computes and the backward pass needs again", "06"),
    "AdamW": ("the optimizer whose two running means fill most of the memory that ZeRO shards", "06"),
    "all-gather": ("a collective: each rank's piece, put together on every rank", "03"),
    "all-reduce": ("a collective: the sum (or mean, ...) of all ranks' arrays, on every rank", "03"),
    "Amdahl": ("whose law says that the part that stays serial limits the speed-up", "11"),
    "asynchronous": ("an operation that has started and is waited for later", "07b"),
    "bandwidth": ("bytes a second, once a message flows", "03"),
    "broadcast": ("a collective: one rank's array, on every rank", "03"),
    "bubble": ("time in which a pipeline's rank has nothing to do", "07"),
    "bucket": ("gradients that travel as one message", "04"),
    "checkpoint": ("what is saved of a training run, to go on from", "06"),
    "collective": ("an operation that all ranks call, in the same order", "00"),
    "column": ("one of two ways to cut a layer: each rank has some outputs, complete", "08"),
    "communicator": ("a group of ranks that exchange messages, and the operations that they call on it", "03"),
    "capacity": ("how many tokens of a rank an expert has places for; others are dropped", "12"),
    "context parallelism": ("ranks that share the tokens of each sequence; DeepSpeed says sequence parallelism", "12"),
    "data parallelism": ("every rank has the whole model and a slice of the batch", "04"),
    "DDP": ("torch's class for data parallelism", "04"),
    "DeepSpeed": ("Microsoft's library with ZeRO and pipelines, driven by a config", "04"),
    "DiLoCo": ("local steps, and an outer optimizer for the way that they have come", "13"),
    "efficiency": ("speed-up over the number of ranks", "02"),
    "FSDP2": ("torch's way to ZeRO's stage 3", "06"),
    "error feedback": ("what was not sent is kept, and added to the next gradient", "13"),
    "gloo": ("Meta's collectives for CPUs, a backend of torch", "04"),
    "gate": ("the layer that chooses the experts of each token", "12"),
    "GPipe": ("a pipeline's order: all micro-batches forward, then all backward", "07"),
    "gradient": ("what a backward pass computes, and ranks add up", "04"),
    "hang": ("ranks that wait for one that does not come", "00"),
    "hook": ("a function that autograd calls when a gradient is ready", "04"),
    "Horovod": ("Uber's library that made the ring popular", "04"),
    "latency": ("the time until even an empty message has arrived", "03"),
    "linear rule": ("k times the batch, k times the learning rate", "05"),
    "makespan": ("the time from the first action of a schedule to the end of the last one", "07"),
    "mesh": ("ranks in rows and columns, with a communicator for each axis", "08"),
    "micro-batch": ("a slice of the batch that goes through a pipeline on its own", "07"),
    "mixed precision": ("computing in 16 bits beside weights that are kept in 32", "06"),
    "mixture of experts": ("several perceptrons, of which each token goes through one or two", "12"),
    "MPI": ("the Message Passing Interface: how programs on clusters exchange messages", "00"),
    "NCCL": ("NVIDIA's collectives for GPUs, a backend of torch", "04"),
    "node": ("one machine of several", "11"),
    "overlap": ("messages that travel while something is computed", "04"),
    "parameter server": ("a process that keeps the weights for all others; before all-reduce", "04"),
    "pipeline": ("ranks that each have some of the layers, one after the other", "07"),
    "prefetch": ("reading the next batch while this one is computed", "09"),
    "rank": ("a process of a world, and its number", "00"),
    "recomputation": ("activations that are not kept: the backward pass computes them once more", "06"),
    "reduce-scatter": ("a collective: the sum of all arrays, of which each rank gets one piece", "03"),
    "ring": ("an all-reduce in which each rank talks to its two neighbours only", "03"),
    "ring attention": ("keys and values that travel round a ring, past the queries of all ranks", "12"),
    "row": ("the other way to cut a layer: each rank has a summand of every output", "08"),
    "seed": ("the number that random numbers begin with", "05"),
    "shard": ("the piece of an array, or of a data set, that one rank keeps", "06"),
    "PowerSGD": ("a gradient's matrix sent as the product of two thin ones", "13"),
    "speed-up": ("how many times faster than one process", "02"),
    "stage": ("of a pipeline: a rank's layers; of ZeRO: how much is sharded", "07"),
    "strong scaling": ("more ranks for the same work", "11"),
    "tensor parallelism": ("ranks that each have a piece of every layer", "08"),
    "tree": ("an all-reduce in which sums go up through pairs, and down again", "03"),
    "ULFM": ("MPI's way to survive failures: revoke a communicator, shrink it to those who live", "11b"),
    "Ulysses": ("attention in which ranks exchange tokens of all heads for all tokens of some heads", "12"),
    "utilisation": ("the fraction of time in which an accelerator computes", "09"),
    "warm-up": ("a learning rate that grows during the first steps", "05"),
    "weak scaling": ("more ranks for as much more work", "11"),
    "world": ("all ranks together", "00"),
    "zigzag": ("an order of chunks by which ranks have early tokens and late ones", "12"),
    "ZeRO": ("states of the optimizer, gradients and weights in shards, in three stages", "06"),
}


def lecture(number: str) -> Path:
    """The source of a lesson's lecture."""
    return next(path for name, path in notebooks().items() if name.startswith(f"{number}_") and is_lecture(path))


def title(source: Path) -> str:
    return re.search(r"^# # (.+)$", source.read_text(encoding="utf-8"), re.M)[1]


def page() -> str:
    """The glossary as Markdown."""
    rows = []
    for term, (meaning, number) in sorted(TERMS.items(), key=lambda item: item[0].lower()):
        source = lecture(number)
        rows.append(f"| **{term}** | {meaning} | [{title(source)}](../notebooks/lectures/{name_of(source)}.ipynb) |")
    head = "# Glossary\n\nEach word with the lesson that explains it. `python -m docs.glossary` writes this page.\n\n"
    return head + "| word | what it means | lesson |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
