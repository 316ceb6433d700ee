import ast
import dataclasses
import itertools
import json
import re

import pytest
import torch

from dtlib import pi
from dtlib.errors import DtlibError
from dtlib.lab import lesson_files
from dtlib.lab.checks import judging
from dtlib.lab.checks.answer_memory import Snapshot, nbytes
from dtlib.lab.checks.exercise import EXERCISES, Wrong, exercise_files, rows
from dtlib.lab.checks.judging import judge_on_this_rank
from dtlib.lab.checks.solutions import source_of
from dtlib.lab.checks.verdict import Verdict
from dtlib.lab.checks.verdict_view import html
from dtlib.lab.lesson_files import module_of, notebooks
from dtlib.lessons.l03.judge_hangs import HANGS
from tests import test_hybrid_lesson, test_sequences_lesson
from tests.cases import all_cases, for_each, refuses
from tests.conftest import ROOT
from tests.lessons.l03 import wrong_collectives
from tests.lessons.l04 import wrong_buckets, wrong_data_parallel
from tests.lessons.l06 import wrong_leak, wrong_zero, wrong_zero2, wrong_zero3
from tests.ranks import on_ranks
from tests.test_large_batches import RIGHT_RATES
from tests.test_pipeline_exercises import RIGHT as RIGHT_TO_LESSON_07
from tests.test_pipeline_exercises import RIGHT_PUZZLES
from tests.wrong_answers.cases import handed_in, judged_soon


def test_every_exercise_is_found_at_its_home_and_no_home_has_one_more():
    at_home = {home: set(module_of(home).EXERCISES) for home in exercise_files().values()}
    assert at_home == {
        home: {name for name in exercise_files() if exercise_files()[name] == home}
        for home in exercise_files().values()
    }
    judges = {path for path in (ROOT / "dtlib" / "lessons").rglob("*.py") if "\nEXERCISES = " in path.read_text()}
    assert len(judges) == len(at_home) and "no such exercise" not in EXERCISES


@on_ranks(2)
def test_a_judge_that_fails_is_told_on_all_ranks(world):
    """Rank 0 alone judges; whoever waits for its verdict hears of it."""
    exercise = dataclasses.replace(EXERCISES["first-sum"], judge=lambda observations: 1 / 0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DtlibError, match="ZeroDivisionError: division by zero"):
        patch.setattr(judging, "EXERCISES", {"first-sum": exercise})
        judge_on_this_rank("first-sum", {"total": 1})


def test_a_first_sum_is_typed_unless_ranks_have_communicated_since_another_one_was_checked():
    from dtlib.lessons.l00.judge_sum import collectives_for

    comm = type("Counted", (), {"collective_count": 0})()
    assert collectives_for(6, comm) == 0
    comm.collective_count = 2
    assert [collectives_for(6, comm), collectives_for(3, comm), collectives_for(6, comm)] == [2, 0, 0]
    comm.collective_count += 1
    assert [collectives_for(6, comm), collectives_for(6, comm)] == [1, 1], "checked again, it stays right"
    assert [collectives_for(each, type("Uncounted", (), {})()) for each in (6, 3)] == [None, None]


def test_a_first_sum_that_nobody_has_computed_is_told():
    from dtlib.lessons.l00.judge_sum import judge_total

    with pytest.raises(Wrong) as wrong:
        judge_total([(6, 0)] * 4)
    assert wrong.value.mistake == "nothing-sent" and len(wrong.value.hints) == 2
    for right in ([(6, 1)] * 4, [(6, None)] * 4, [(0, 0)]):  # added up; nobody counts; a rank alone
        judge_total(right)


def test_an_estimate_that_is_no_number_is_no_right_one():
    from dtlib.lessons.l02.judge_pi import judge_estimate

    with pytest.raises(Wrong, match="other-estimate"):
        judge_estimate([[(3000, [(*pi.slice_of(3000, rank, 3), 0)], float("nan"))] for rank in range(3)])


def test_the_first_row_that_holds_is_told():
    for expected in ((), ("a sum",)):
        wrong = rows(2, *expected)
        told = ("a sum", "a mean")[len(expected) :]
        wrong("of others", False, *told, "Who divides?")
        with pytest.raises(Wrong) as raised:
            wrong("mean", True, *told, "Who divides?", "Nobody.", score="3")
        found = raised.value
        assert (found.mistake, found.rank, found.expected, found.got) == ("mean", 2, "a sum", "a mean")
        assert found.hints == ("Who divides?", "Nobody.") and found.score == "3"


def test_every_row_says_what_was_expected_what_was_there_and_a_hint():
    short, counted = [], 0
    for _, file in lesson_files.found("judge_*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and "id" in vars(node.func)]
            calls = [(call.lineno, call.func.id, call.args) for call in calls if call.func.id in ("rows", "wrong")]
            for line, name, given in sorted(calls, key=lambda call: call[0]):
                if name == "rows":
                    least = 6 - len(given)  # mistake, whether it holds, expected unless it is bound, got, a hint
                    continue
                counted += 1
                if len(given) + any(isinstance(each, ast.Starred) for each in given) < least:
                    short.append(f"{file.name}:{line}")
    assert not short and counted > 250


def count_right(points, comm):
    return pi.count_numpy(*pi.slice_of(points, comm.rank, comm.size))


def count_right_with_own_kernel(points, comm):
    """Strided, and without dtlib's kernels: as good a way to count every point once."""
    inside = 0
    for i in range(comm.rank, points, comm.size):
        x, y = pi.point(i)
        inside += x * x + y * y < pi.RADIUS_SQUARED
    return inside


def estimate_right(points, comm):
    inside = torch.tensor([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))])
    return 4 * comm.all_reduce(inside).item() / points


EXPLAINED = {number: hang.culprits[0] for number, hang in HANGS.items()}


def ring_by_split(comm, tensor):
    """The ring of the lecture."""
    return wrong_collectives.ring(comm, tensor, torch.tensor_split(tensor, comm.size))


def weighted_mean(comm, model, images, labels):
    """A weight times the mean; the mean over ranks of their images; a rank without images has a sum of no scores."""
    from torch.nn.functional import cross_entropy

    weight = len(images) / (sum(comm.all_gather_object(len(images))) / comm.size)
    return weight * cross_entropy(model(images), labels) if len(images) else model(images).sum()


def weighted_sum(comm, model, images, labels):
    scores = model(images).log_softmax(1)
    total = comm.all_reduce(torch.tensor([float(len(images))]), op="mean")
    return -scores[torch.arange(len(labels)), labels].sum() / total


@on_ranks(1, 3, 4, slow=(1, 4))
def test_right_answers_pass(world):
    total = torch.tensor([world.rank])
    world.comm.all_reduce(total)
    answers = {"total": total, "count_my_points": count_right, "estimate_pi": estimate_right}
    answers |= {"ring_all_reduce": ring_by_split, "my_all_reduce": ring_by_split, "explained": EXPLAINED}
    answers |= {"golf": golf_right, "fit": FIT} | RIGHT_RATES | RIGHT_PUZZLES
    for exercise, home in exercise_files().items():
        if exercise not in RIGHT and home.parent.name < "l09":  # later lessons have some, too
            verdict = judge_on_this_rank(exercise, answers)
            alone = exercise == "noise-scale" and world.size == 1  # which says so
            assert verdict.mistake == ("one-rank" if alone else ""), verdict.text()
    assert judge_on_this_rank("pi-streams", {"count_my_points": count_right_with_own_kernel}).passed
    score = judge_on_this_rank("fit-it", answers).score
    assert "8 ranks at stage 3 hold 15 GB" in score and "105 ranks" in score


def ring_to_the_left(comm, tensor):
    """The other way round, chunks as torch.chunk makes them (fewer than ranks, if it so happens), numpy's views."""
    length = -(-len(tensor) // comm.size)
    chunks = [tensor[length * p : length * (p + 1)].numpy() for p in range(comm.size)]
    to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for step in range(2 * (comm.size - 1)):
        outgoing, incoming = chunks[(comm.rank + step) % comm.size], chunks[(comm.rank + step + 1) % comm.size]
        received = torch.empty(len(incoming), dtype=tensor.dtype)
        arriving = comm.recv(received, source, async_op=True)
        leaving = comm.send(outgoing.copy(), to, async_op=True)
        arriving.wait()
        while not leaving.done():  # as good as to wait
            pass
        incoming[:] = received.numpy() + (incoming if step < comm.size - 1 else 0)


def ring_with_padding(comm, tensor):
    length = -(-len(tensor) // comm.size)
    padded = torch.zeros(length * comm.size, dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    ring_by_split(comm, padded)
    tensor.copy_(padded[: len(tensor)])


def ring_with_a_long_last_chunk(comm, tensor):
    length = len(tensor) // comm.size
    chunks = [tensor[length * p : length * (p + 1)] for p in range(comm.size - 1)]
    return wrong_collectives.ring(comm, tensor, [*chunks, tensor[length * (comm.size - 1) :]])


def ring_without_empty_messages(comm, tensor):
    """Even ranks send first, odd ones receive first (the last of an odd number waits a little), and blocks only."""
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(2 * (comm.size - 1)):
        reduces = step < comm.size - 1
        number = (comm.rank - step - 1) % comm.size if reduces else (comm.rank - step + comm.size - 1) % comm.size
        outgoing, incoming = chunks[number], chunks[(number - 1) % comm.size]
        received = torch.zeros_like(incoming)

        def send(outgoing=outgoing):
            if len(outgoing):
                comm.send(outgoing, right)

        def recv(received=received):
            if len(received):
                comm.recv(received, left)

        for act in (send, recv) if comm.rank % 2 == 0 else (recv, send):
            act()
        incoming.copy_(received + incoming if reduces else received)


def ring_both_ways(comm, tensor):
    """Half of it goes right, half left."""
    half = len(tensor) // 2
    ring_by_split(comm, tensor[:half])
    ring_to_the_left(comm, tensor[half:])


RINGS = [
    ring_by_split, ring_to_the_left, ring_with_padding, ring_with_a_long_last_chunk, ring_without_empty_messages,
    ring_both_ways,
]  # fmt: skip


@on_ranks(1, 3, 4, slow=(1, 4))
@for_each(ring=[ring.__name__ for ring in RINGS])
def test_every_right_ring_passes(world, ring):
    verdict = judge_on_this_rank("ring-build", {"my_all_reduce": globals()[ring]})
    assert verdict.passed, verdict.text()


@on_ranks(2)
def test_hangs_may_be_explained_by_line_or_by_number(world):
    lines = {
        1: (2, "if comm.rank != 2:"),
        2: (1, "line 3: batches = 3 if comm.rank == 1 else 4"),
        3: [1, "comm.recv(theirs, other)  # both"],
        4: (1, "recv(batch, 0, tag = 2)"),
        5: (0, "100 // comm.rank"),
    }
    for explained in (EXPLAINED, lines, {n: (rank, f"{line}") for n, (rank, line) in EXPLAINED.items()}):
        verdict = judge_on_this_rank("hangs", {"explained": explained})
        assert verdict.passed, verdict.text()


def hooks_right(comm, module):
    return wrong_data_parallel.with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"))


def hooks_that_divide_afterwards(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad)
        parameter.grad /= comm.size

    return wrong_data_parallel.with_hooks(comm, module, act)


def hooks_that_return_the_average(comm, module):
    """The older kind of hook, which gets a gradient and returns another."""
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: comm.all_reduce(gradient.clone(), op="mean"))


class BucketsInForwardOrder(wrong_buckets.Right):
    def parameters(self):
        return super().parameters()[::-1]


class BucketsOfTheLibrary(wrong_buckets.Right):
    """The small first bucket of the library, under way all at once, and views instead of copies."""

    def average_gradients(self, samples):
        from dtlib.gradients.buckets import FlatBuffer, buckets_of

        weight, parameters, handles = self.weight(samples), self.parameters(), []
        for numbers in buckets_of(parameters, self.bucket_bytes, self.bucket_bytes):
            bucket = [parameters[number] for number in numbers]
            buffer = FlatBuffer([parameter.shape for parameter in bucket], bucket[0].dtype)
            for parameter, view in zip(bucket, buffer.views, strict=True):
                view.copy_(parameter.grad * weight)
                parameter.grad = view
            handles.append(self.comm.all_reduce(buffer.flat, async_op=True))
        for handle in handles:
            handle.wait()


class SamplesTravelAlong(wrong_buckets.Right):
    """No message for the samples: each bucket carries them behind its gradients."""

    def weight(self, samples):
        self.samples = samples
        return samples

    def reduce(self, flat):
        longer = torch.cat([flat, torch.tensor([float(self.samples)], dtype=flat.dtype)])
        self.comm.all_reduce(longer)
        flat.copy_(longer[:-1] / longer[-1])


class MeanOfScaled(wrong_buckets.Right):
    def weight(self, samples):
        return super().weight(samples) * self.comm.size

    def reduce(self, flat):
        self.comm.all_reduce(flat, op="mean")


class WeightOfATensor(wrong_buckets.Right):
    """Whole numbers divided are a float32 in torch."""

    def weight(self, samples):
        return samples / self.comm.all_reduce(torch.tensor([samples]))


def golf_right(comm, x, y):
    from dtlib.lessons.l04.judge_byte_golf import reference

    return reference(comm, x, y)


RIGHT_TO_LESSON_04 = {
    "weight-the-batch": [weighted_mean, weighted_sum],
    "hook-fix": (hooks_right, hooks_that_divide_afterwards, hooks_that_return_the_average),
    "buckets-build": (wrong_buckets.Right, BucketsInForwardOrder, BucketsOfTheLibrary, SamplesTravelAlong,
                      MeanOfScaled, WeightOfATensor),
}  # fmt: skip


FIT = {"stage": 3, "ranks": 8, "gigabytes": 15}


def shards_right(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return wrong_zero2.scattered(comm, flat, length)

    return wrong_zero2.with_hooks(comm, module, act)


def shards_a_copy(comm, module):
    """Travels in place; what is kept is a copy, divided afterwards."""

    def act(parameter, flat, length):
        parameter.grad = None
        own = comm.reduce_scatter(wrong_zero2.shard_of(flat, comm.rank, length), flat)
        return own / comm.size

    return wrong_zero2.with_hooks(comm, module, act)


class AdamWithCopies(wrong_zero.Right):
    """The model keeps its own memory, an owner has a copy of its shard, and broadcasts it; no flat tensor stays."""

    def prepare(self):
        self.flat = self.shard(self.flat).clone()
        super().prepare()

    def shard(self, flat, rank=None):
        return flat if len(flat) == self.length else super().shard(flat, rank)

    def use(self, flat):
        pass

    def gather(self):
        flat = torch.empty(self.length * self.comm.size, dtype=self.own.dtype)
        for rank in range(self.comm.size):
            self.shard(flat, rank).copy_(self.own.detach() if rank == self.comm.rank else self.shard(flat, rank))
            self.comm.broadcast(self.shard(flat, rank), root=rank)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data.copy_(view.view_as(parameter))


class AdamReducesToOwners(wrong_zero.ByHand):
    """One reduce for each shard, to its owner, and a division afterwards."""

    def reduce(self, gradients):
        for rank in range(self.comm.size):
            self.comm.reduce(self.shard(gradients, rank), root=rank)
        return self.shard(gradients) / self.comm.size


class LayerInTwoShards(wrong_zero3.RightLayer):
    """Weight and bias are sharded and gathered one by one."""

    def __init__(self, comm, layer):
        self.comm, self.shapes, self.own = comm, [layer.weight.shape, layer.bias.shape], []
        for tensor in (layer.weight.detach().flatten(), layer.bias.detach()):
            length = -(-len(tensor) // comm.size)
            padded = torch.nn.functional.pad(tensor, (0, length * comm.size - len(tensor)))
            self.own.append(wrong_zero2.shard_of(padded, comm.rank, length).clone())

    def __call__(self, x):
        whole = []
        for shape, own in zip(self.shapes, self.own, strict=True):
            gathered = self.comm.all_gather(torch.empty(len(own) * self.comm.size, dtype=own.dtype), own)
            whole.append(gathered[: shape.numel()].view(shape))
        return torch.nn.functional.linear(x, *whole)


class StepsThatFree(wrong_leak.StepsWithBuckets):
    """As the solution: what has been waited for goes."""

    def wait(self):
        while self.sent:
            self.sent.pop(0)[0].wait()


class StepsOfNewLists(wrong_leak.StepsWithViews):
    """A row as a new tensor of its numbers, and the list emptied at once."""

    def guess(self, output):
        return output.new_tensor(output[0].tolist())


class StepsOfNumbers(StepsThatFree):
    """A row as a plot takes it, too."""

    def guess(self, output):
        return output[0].tolist()


class StepsOfArrays(StepsThatFree):
    def guess(self, output):
        return output[0].detach().numpy().copy()


RIGHT_TO_LESSON_06 = {
    "zero-leak": (StepsThatFree, StepsOfNewLists, StepsOfNumbers, StepsOfArrays),
    "zero2-fix": (shards_right, shards_a_copy),
    "sharded-adam": (wrong_zero.Right, wrong_zero.ByHand, AdamWithCopies, AdamReducesToOwners),
    "gather-on-demand": (wrong_zero3.RightLayer, LayerInTwoShards),
}


RIGHT = {
    **RIGHT_TO_LESSON_04, **RIGHT_TO_LESSON_06, **RIGHT_TO_LESSON_07, **test_hybrid_lesson.RIGHT,
    **test_sequences_lesson.RIGHT,
}  # fmt: skip


def passes(exercise, answers):
    for answer in answers:
        verdict = judge_on_this_rank(exercise, {EXERCISES[exercise].name: handed_in(answer)})
        assert verdict.passed, f"{answer.__name__}: {verdict.text()}"


@on_ranks(3)
@for_each(exercise=[exercise for exercise in RIGHT if exercise != "step-build"])
def test_a_right_answer_in_other_words_passes(world, exercise):
    passes(exercise, RIGHT[exercise][-1:])


@on_ranks(1, 2, 3, 4, slow=(1, 2, 3, 4))
@for_each(exercise=RIGHT)
def test_right_answers_in_other_words_pass(world, exercise):
    passes(exercise, RIGHT[exercise])


def test_memory_is_found_wherever_it_is_kept():
    """On a function, in a closure, behind a view, as a gradient, and in a tensor that was there before."""
    old, untouched, weight = torch.zeros(100), torch.zeros(1000), torch.nn.Parameter(torch.zeros(10))
    untouched.add_(1)
    another = torch.nn.Parameter(torch.zeros(1))
    another.data = untouched[:10]  # the same storage, with a count of changes of its own
    sparse = torch.nn.Embedding(4, 2, sparse=True)  # whose gradient has no storage
    sparse(torch.tensor([1])).sum().backward()

    def closure(hidden):
        return lambda: hidden

    def keeps():
        keeps.on_function = torch.zeros(20)
        view = torch.zeros(30)[:1]
        weight.grad = torch.zeros(10)
        old.add_(1)
        torch.zeros(5000)  # and gone
        return closure(torch.zeros(40)), view

    with Snapshot() as before:
        kept = keeps()
        found = before.new(also=[weight])
    assert sorted(len(storage) for storage in found) == [10, 10, 20, 30, 40, 100]
    assert nbytes(found) == 4 * 210
    assert len(kept) == 2 and len(untouched) == 1000


class KeepsNoTensors:
    """Memory where the garbage collector knows nothing of it: each in another place."""

    old = b"1" * 8000

    def __init__(self, hidden):
        import numpy as np

        self.views = {"a view": np.zeros(1000)[:3]}
        self.of_a_tensor = hidden.numpy()  # which is counted as a tensor already
        KeepsNoTensors.on_the_class = bytearray(300)
        self.within = lambda: floats
        floats = [1.0] * 50, [2] * 1000  # whole numbers are few where an answer has them: shapes and sizes
        self.call.__func__.on_a_function = memoryview(bytes(70))

    def call(self): ...


def test_memory_that_is_no_tensor_is_found_too():
    for _ in range(2):  # what the first one has left on the class is not new
        with Snapshot(KeepsNoTensors) as before:
            kept = KeepsNoTensors(torch.zeros(125))
            found = before.new(of=[kept])
        assert nbytes(found) == 1000 * 8 + 125 * 4 + 300 + 50 * 8 + 70, [len(one) for one in found]


@on_ranks(3)
def test_byte_golf_tells_the_score(world):
    verdict = judge_on_this_rank("byte-golf", {"golf": golf_right})
    mine, par = [int(word.strip(".").replace(",", "")) for word in verdict.score.split() if word[:3].isdigit()]
    assert mine == par == 40 * 2 * 2 * 2 * 2410  # steps, 2 (N-1) P, two bytes
    assert verdict.score in verdict.text()


@pytest.fixture
def cells_with():
    """``cells_with(text, version)``: the learner's or the solved cells of the exercises, without %%px."""
    from tests.books import made  # not on the ranks

    def find(text, version, lesson="03_collectives"):
        book = made(notebooks()[f"{lesson}_exercises"], version)
        sources = [cell.source for cell in book.cells if cell.cell_type == "code"]
        return [source.removeprefix("%%px\n") for source in sources if text in source]

    return find


@pytest.mark.parametrize("number", HANGS)
def test_the_planted_hangs_are_those_of_the_notebook(number, cells_with):
    assert cells_with(f"def hang_{number}(", "learner") == [HANGS[number].source.strip("\n")]


STUBS = {  # of each set, exercise -> the mistake of its stub
    "03_collectives": {"ring-fix": "incomplete", "ring-build": "nothing-done"},
    "04_data_parallel": {"hook-fix": "parameter-reduced", "buckets-build": "not-broadcast", "byte-golf": "over-par"},
    "06_zero": {
        "zero2-fix": "all-reduced", "sharded-adam": "not-copied-back", "gather-on-demand": "type", "fit-it": "type",
    },
    "07_pipelines": {
        "pipeline-fix": "averaged-twice", "gpipe-build": "no-forward", "1f1b-build": "no-forward",
        "leak-fix": "output-held",
    },
    "08_tensor_and_hybrid": {"row-fix": "bias-once-a-rank", "mlp-build": "type", "step-build": "type"},
}  # fmt: skip


@pytest.fixture
def stubs_and_solutions(cells_with):
    """Exercise, its cell behind the set's imports and what the set gives, and the mistake to be recognised."""
    found = []
    for lesson, version in itertools.product(STUBS, ("learner", "solved")):
        cells = cells_with("", version, lesson)
        lines = [line for cell in cells for line in cell.splitlines()]
        given = [line for line in lines if re.match("(from|import) [^;]+$", line)]
        given += [cell for cell in cells if "def in_turn(" in cell]
        for exercise, mistake in STUBS[lesson].items():
            begins = rf"(?m)^((def|class) {EXERCISES[exercise].name}\b|{EXERCISES[exercise].name} = )"
            source = next(cell for cell in cells if re.search(begins, cell))
            found.append((exercise, "\n".join([*given, source]), mistake if version == "learner" else ""))
    return found


@on_ranks(3)
def test_stubs_are_wrong_and_their_solutions_right(world, stubs_and_solutions):
    with all_cases() as case:
        for exercise, source, expected in stubs_and_solutions:
            exec(source, names := {})
            verdict = judged_soon(exercise, names, expected)
            with case(exercise, expected):
                assert verdict.mistake == expected and (verdict.passed or verdict.hints), verdict.text()


@on_ranks(3)
def test_each_planted_hang_ends_and_names_its_culprit(world):
    import contextlib
    import io

    from dtlib.lessons.l03.judge_hangs import watch

    for number, hang in HANGS.items():
        names = {"torch": torch}
        exec(compile(hang.source.strip("\n"), "<hang>", "exec"), names)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            watch(names[f"hang_{number}"], seconds=0.5)
        everything = world.comm.all_gather_object(said.getvalue())
        assert any("Waited 0.5 s in" in text for text in everything), everything
        culprits = {rank for rank, _ in hang.culprits}
        waiting = [text for text in everything if "Waited" in text]
        assert all(any(f"rank {culprit}" in text for culprit in culprits) for text in waiting), everything


@on_ranks(2)
def test_an_answer_that_is_missing_or_raises_on_one_rank_is_named_with_the_rank(world):
    def raises_on_rank_1(points, comm):
        if comm.rank == 1:
            raise ValueError("no points for me")
        return estimate_right(points, comm)

    verdict = judged_soon("pi-on-ranks", {"estimate_pi": raises_on_rank_1}, "raised")
    assert (verdict.mistake, verdict.rank, verdict.got) == (
        "raised",
        1,
        "ValueError: no points for me, in raises_on_rank_1(2000, comm) on 2 ranks",
    )

    def ends_in_mpi(points, comm):
        from mpi4py import MPI

        raise MPI.Exception(MPI.ERR_TRUNCATE)

    verdict = judged_soon("pi-on-ranks", {"estimate_pi": ends_in_mpi}, "waited")
    assert verdict.mistake == "waited" and "MPI_ERR_TRUNCATE" in verdict.got and "calls or sizes differ" in verdict.got
    only_on_rank_0 = {"estimate_pi": estimate_right} if world.rank == 0 else {}
    verdict = judged_soon("pi-on-ranks", only_on_rank_0, "missing")
    assert (verdict.mistake, verdict.rank) == ("missing", 1)


def test_later_attempts_get_plainer_hints():
    verdict = Verdict("pi-streams", "def f():", 3, 1, "gap", "all", "some", ("think", "do this"))
    assert [verdict.text(attempt).splitlines()[-1].split()[1] for attempt in (0, 1, 2)] == ["think", "do", "do"]


def test_a_verdict_says_in_words_and_with_a_sign_how_it_went():
    wrong = Verdict("first-sum", "line 1: total = a<b", 3, 2, "other", "6", "5 & 1", ("vague", "plain"))
    block = html(wrong, 1)
    for words in (
        "&#8635;</b> <b>Not yet:</b> first-sum, on rank 2.",
        ">6<",
        ">5 &amp; 1<",
        ">plain<",
        "total = a&lt;b",
    ):
        assert words in block
    assert "vague" in html(wrong, 0) and "vague" not in block
    said = ["Judged on 3 ranks: line 1: total = a<b", "Not yet: first-sum, on rank 2.", "  expected: 6"]
    assert wrong.text(9).split("\n") == [*said, "  got:      5 & 1", "  hint:     plain"]
    right = Verdict("schedule-puzzle", "line 1", 0, score="Makespan 33.", picture="F0 <B0>")
    assert "&#10003;</b> <b>Passed:</b> schedule-puzzle. Makespan 33." in html(right, 0)
    assert "F0 &lt;B0&gt;" in html(right, 0) and "expected" not in html(right, 0)


def test_another_answer_begins_with_the_first_hint(capsys):
    judging._tries.clear()
    judging._failed.pop("pi-streams", None)
    hints, offers = [], []
    for code, mistake in (("a", "gap"), ("a", "gap"), ("b", "missing"), ("b", "gap"), ("b", "overlap"), ("b", "gap")):
        judging._show_verdict(Verdict("pi-streams", "f", 3, 1, mistake, "all", "some", ("1", "2", "3"), code=code))
        said = capsys.readouterr().out
        hints.append(re.search(r"hint: +(\d)", said)[1])
        offers.append('lab.solution("pi-streams") shows one' in said)
    assert hints == ["1", "2", "1", "2", "3", "3"]
    assert offers == [False, False, True, True, True, True]
    judging._show_verdict(Verdict("pi-streams", "f", 3, code="c"))
    assert "solution" not in capsys.readouterr().out, "an answer that passed needs none"


def test_every_exercise_has_a_solution_to_show():
    wrong = Verdict("first-sum", "line 1", 3, 2, "other", "6", "5", ("vague",))
    assert "<details><summary>Show a solution</summary>" in html(wrong, 0, "a < b")
    assert "a &lt; b</pre></details>" in html(wrong, 0, "a < b") and "details" not in html(wrong, 0)
    learners = "".join(
        path.read_text() for kind in ("lectures", "exercises") for path in (ROOT / "notebooks" / kind).glob("*.ipynb")
    )
    for name, exercise in EXERCISES.items():
        source = source_of(name)
        assert re.search(rf"\b{exercise.name}\b", source) and "lab.check" not in source, name
        assert json.dumps(source)[1:-1] not in learners, f"{name} is solved in a learner's notebook"
    refuses("There is no exercise 'ring'", source_of, "ring")
    refuses("There is no exercise 'ring-biuld': did you mean 'ring-build'", source_of, "ring-biuld")


def test_an_answer_is_known_by_its_code_or_value():
    from dtlib.lab.checks.judging import fingerprint

    def one(x):
        return x + 1

    def other(x):
        return x + 2

    things = [one, other, {1: (2, 3)}, {1: (2, 4)}, "F0", torch.tensor(1), wrong_buckets.Right, wrong_buckets.OneBucket]
    assert len({fingerprint(thing) for thing in things}) == len(things)
    assert fingerprint(one) == fingerprint(one) and fingerprint({1: (2, 3)}) == fingerprint({1: (2, 3)})


def test_a_magic_is_found_below_comments_and_behind_spaces():
    from dtlib.lab.engines.extension import magic_first

    assert magic_first([" %%px\n", "x = 1\n"]) == ["%%px\n", "x = 1\n"]
    assert magic_first(["# all\n", "%%px --local\n", "x = 1\n"]) == ["%%px --local\n", "# all\n", "x = 1\n"]
    assert magic_first(["x = 1\n", "%%px\n"]) == ["x = 1\n", "%%px\n"]


def test_a_name_of_lab_with_a_slip_is_suggested():
    from dtlib import lab

    with pytest.raises(AttributeError, match=r"has no attribute 'chek'\. Did you mean: 'check'\?"):
        _ = lab.chek


@pytest.mark.parametrize("error,words", [
    ("no_such_name", "Has the cell that defines it run"), ("None + 1", "A value is None there"),
    ("1 / 0", "What is zero or empty there"), ("[][3]", "Which key or index"),
    ("points.strip()", "Has that object an attribute"),
    ("torch.zeros(2) + torch.zeros(3)", "Print shape and dtype"),
])  # fmt: skip
def test_an_error_has_a_hint_of_its_own_and_says_in_which_line(error, words):
    import linecache

    from dtlib.lab.checks.judging import explain_error

    names, source = {"torch": torch}, f"def answer(points):\n    return {error}\n"
    linecache.cache["<cell>"] = len(source), None, source.splitlines(True), "<cell>"
    exec(compile(source, "<cell>", "exec"), names)
    try:
        names["answer"](1)
    except Exception as problem:
        got, hints = explain_error(problem, names["answer"])
    assert got.split(":")[0].endswith("Error")
    assert f"in line 2, `return {error}`" in hints[0] and words in hints[0]
    try:
        names["answer"]()
    except TypeError as problem:
        assert "parameters match" in explain_error(problem, names["answer"])[1][0]
