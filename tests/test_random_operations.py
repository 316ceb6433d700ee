"""A thousand random sequences of operations, types and sizes, against the same sequence computed by one process."""

import random

import numpy as np
import pytest
import torch

from tests.ranks import on_ranks

SEQUENCES = 1000
LONGEST = 6
TYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
REDUCTIONS = {"sum": torch.Tensor.sum, "max": torch.Tensor.amax, "min": torch.Tensor.amin, "prod": torch.Tensor.prod}
OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather", "all_to_all", "rows",
    "barrier", "message", "object",
)  # fmt: skip


class Step:
    """One operation with all its arguments, the same on every rank as all draw from the same generator."""

    def __init__(self, chance: random.Random, size: int):
        self.operation = chance.choice(OPERATIONS)
        self.dtype = getattr(torch, chance.choice(TYPES))
        self.op = chance.choice(["max", "min"] if self.dtype == torch.bool else list(REDUCTIONS))
        self.count = chance.choice([0, 1, 2, 3, 7, 64, 1000, 70_000])
        self.root = chance.randrange(size)
        self.other = chance.choice([rank for rank in range(size) if rank != self.root])
        self.asynchronous = chance.random() < 0.4
        self.algorithm = None
        if self.operation == "all_reduce":
            self.algorithm = chance.choice([None, "ring", "recursive_doubling", "rabenseifner", "tree", "naive"])
        self.strided = chance.random() < 0.2
        self.seed = chance.randrange(2**31)

    def values(self, rank: int, chunks: int = 1) -> torch.Tensor:
        """What ``rank`` brings: small whole numbers, so that every order of adding them gives the same."""
        generator = np.random.default_rng([self.seed, rank])
        highest = 2 if self.op == "prod" else 8
        return torch.from_numpy(generator.integers(0, highest, self.count * chunks)).to(self.dtype)

    def reduced(self, everyone: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(everyone)
        wide = stacked.to(torch.int64 if self.dtype in (torch.bool, torch.uint8) else stacked.dtype)
        wide = wide.float() if self.dtype in (torch.bfloat16, torch.float16) else wide
        return REDUCTIONS[self.op](wide, 0).to(self.dtype)


def memory(step, values):
    """A tensor with these values, now and then one that is not contiguous."""
    if not step.strided:
        return values.clone()
    table = torch.zeros(len(values), 2, *values.shape[1:], dtype=values.dtype)
    table[:, 1] = values
    return table[:, 1]


def run(comm, step, pending):
    """Do the step on this rank; ``pending`` collects (handle, result, expected)."""
    size, me, root, mine = comm.size, comm.rank, step.root, step.values(comm.rank)
    extra = {"async_op": step.asynchronous}

    def everyone():
        return [step.values(rank) for rank in range(size)]

    def whole(rank):
        return step.values(rank, chunks=size)

    def chunk(whole, rank):
        return whole[rank * step.count : (rank + 1) * step.count]

    tensor, room = memory(step, mine), memory(step, torch.zeros(step.count, dtype=step.dtype))
    big = memory(step, torch.zeros(step.count * size, dtype=step.dtype))
    match step.operation:
        case "all_reduce":
            handle = comm.all_reduce(tensor, step.op, algorithm=step.algorithm, **extra)
            result, expected = tensor, step.reduced(everyone())
        case "reduce":
            handle = comm.reduce(tensor, root, step.op, **extra)
            result, expected = tensor, step.reduced(everyone()) if me == root else mine
        case "broadcast":
            handle = comm.broadcast(tensor, root, **extra)
            result, expected = tensor, step.values(root)
        case "all_gather":
            handle = comm.all_gather(big, tensor, **extra)
            result, expected = big, torch.cat(everyone())
        case "reduce_scatter":
            handle = comm.reduce_scatter(room, memory(step, whole(me)), step.op, **extra)
            result, expected = room, chunk(step.reduced([whole(rank) for rank in range(size)]), me)
        case "scatter":
            handle = comm.scatter(room, memory(step, whole(me)) if me == root else None, root, **extra)
            result, expected = room, chunk(whole(root), me)
        case "gather":
            handle = comm.gather(big if me == root else None, tensor, root, **extra)
            result, expected = big, torch.cat(everyone()) if me == root else torch.zeros_like(big)
        case "all_to_all":
            handle = comm.all_to_all(big, memory(step, whole(me)), **extra)
            result, expected = big, torch.cat([chunk(whole(rank), me) for rank in range(size)])
        case "rows":
            counts = np.random.default_rng(step.seed).integers(0, 3, (size, size)) * min(step.count, 100)
            counts *= np.random.default_rng(step.seed + 1).random((size, size)) < 0.7  # many have nothing for another
            rows = [
                [torch.full((int(n), 2), r * size + s).to(step.dtype) for s, n in enumerate(c)]
                for r, c in enumerate(counts)
            ]
            expected = torch.cat([rows[rank][me] for rank in range(size)])
            result = memory(step, torch.zeros_like(expected))
            handle = comm.all_to_all(result, memory(step, torch.cat(rows[me])), counts[:, me], counts[me], **extra)
        case "barrier":
            handle, result, expected = comm.barrier(**extra), tensor, mine
        case "message":
            result, expected, handle = room, torch.zeros_like(mine), None
            if me == root:
                handle = comm.send(tensor, step.other, **extra)
            elif me == step.other:
                handle = comm.recv(room, root, **extra)
                expected = step.values(root)
        case "object":
            handle, result, expected = None, torch.tensor(comm.all_gather_object(me)), torch.arange(size)
    pending.append((handle if step.asynchronous else None, result, expected, step))


def finish(pending, chance):
    """Wait for what is pending, in any order, and compare."""
    chance.shuffle(pending)
    while pending:
        handle, result, expected, step = pending.pop()
        if handle is not None:
            handle.wait()
        assert torch.equal(result, expected), vars(step)


@on_ranks(3, 4)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("sequences", [40, pytest.param(SEQUENCES // 2, marks=pytest.mark.nightly)])
def test_random_sequences_agree_with_one_process(world, sequences, verify):
    comm = world.comm.split(0)
    comm.verify = verify
    chance, order = random.Random(20 + world.size + verify), random.Random(world.rank)
    for _ in range(sequences):
        pending = []
        for _ in range(chance.randint(1, LONGEST)):
            run(comm, Step(chance, comm.size), pending)
            if chance.random() < 0.3:
                finish(pending, order)
        finish(pending, order)
