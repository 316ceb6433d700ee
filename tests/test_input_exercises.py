"""The exercises of lesson 09: unusual right answers pass."""

import pytest
import torch
from torch.utils.data import get_worker_info

from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lab.checks.judging import judge_here, judge_on_this_rank
from dtlib.lessons.l09.judge_formats import cost
from tests.lessons.l09.wrong_input import _Stream
from tests.lessons.l09.wrong_resuming import Right
from tests.ranks import on_ranks


def verdict_on(exercise, answer):
    return judge_here(exercise, {EXERCISES[exercise].name: answer})


def by_seed(comm, count):
    """A seed in place of the order; contiguous parts."""
    [seed] = comm.broadcast(torch.randint(2**31, (1,))).tolist()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return tuple(order.tensor_split(comm.size)[comm.rank].tolist())


def dealt_by_rank_0(comm, count):
    order = torch.randperm(count).tolist()
    parts = [order[rank :: comm.size] for rank in range(comm.size)]
    return comm.mpi.scatter(parts if comm.rank == 0 else None, root=0)


class Dealt(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        at, of = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.order[self.rank * of + at :: self.ranks * of]


class KeepsWhatIsLeft(Right):
    """The whole rest as a list, the same on all ranks: long, and right."""

    def state_dict(self):
        return {"rest": self.order[self.taken :]}

    def load_state_dict(self, state):
        self.order, self.taken = state["rest"], 0


class OneByOne(_Stream):
    """Each worker walks through all, and takes its own."""

    def __iter__(self):
        worker = get_worker_info()
        for place, number in enumerate(self.order):
            reader, of = divmod(place, self.ranks)
            if of == self.rank and (worker is None or reader % worker.num_workers == worker.id):
                yield number


class Contiguous(Right):
    """A rank's batch is a piece of the step; the state is what is left to do."""

    def batch(self):
        first = self.taken + self.rank * self.batch_size
        return list(self.order[first : first + self.batch_size])

    def state_dict(self):
        return {"left": len(self.order) - self.taken}

    def load_state_dict(self, state):
        self.taken = len(self.order) - state["left"]


@pytest.mark.parametrize("exercise,answer", [
    ("twice-fix", OneByOne), ("resume-build", Contiguous),
    ("twice-fix", Dealt), ("resume-build", Right), ("resume-build", KeepsWhatIsLeft), ("format-budget", cost),
])  # fmt: skip
def test_right_answers_pass(exercise, answer):
    assert verdict_on(exercise, answer).passed, verdict_on(exercise, answer).text()


@on_ranks(3)
def test_right_parts_of_an_epoch_pass(world):
    for answer in (by_seed, dealt_by_rank_0):
        verdict = judge_on_this_rank("shard-fix", {"my_samples": answer})
        assert verdict.passed, verdict.text()
