# ruff: noqa: E501
"""Seventy planted mistakes, each of a line or two: is every one of them noticed?

    python -m tests.mutations [numbers]        the mistakes of these numbers (from 0), by default all; 3-9 is a range
    python -m tests.mutations --tests FOLDER   with the tests in another folder, such as those of another commit

    python -m tests.mutations --all-sizes      on worlds of all sizes, and with the tests' own patience

Each is planted in a copy of this tree, where the tests that should notice run until the first of them fails. The exit
status is the number of mistakes that nobody has noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

# File, what stands there once, the mistake, and the tests that should notice: files, or files and -k.
MUTATIONS = [
    ("comm/algorithms.py", "if me + bit < link.size:\n            sends", "if me + bit < link.size - 1:\n            sends", "test_comm.py -k broadcast"),
    ("comm/algorithms.py", "if link.rank < partner else (received, array)", "if link.rank > partner else (array, array)", "test_comm.py -k all_reduce_and_reduce"),
    ("comm/algorithms.py", "chunks[(link.rank - step) % link.size], chunks[(link.rank - step - 1) % link.size]\n        yield [link.send(outgoing, right), link.recv(incoming", "chunks[(link.rank - step) % link.size], chunks[(link.rank - step + 1) % link.size]\n        yield [link.send(outgoing, right), link.recv(incoming", "test_ring.py test_comm.py"),
    ("comm/algorithms.py", "for number in range(2)]", "for number in (0, 0)]", "test_comm.py -k reduce_scatter"),
    ("comm/algorithms.py", "link.recv(rows[have : have + count], source)", "link.recv(rows[have - 1 : have - 1 + count], source)", "test_comm.py -k object test_random_operations.py"),
    ("comm/algorithms.py", "out_chunks[link.rank][...] = chunks[link.rank]", "out_chunks[link.rank][...] = chunks[0]", "test_comm.py -k all_to_all test_random_operations.py"),
    ("comm/types.py", "if self.memory is not None:", "if False:", "test_comm.py test_random_operations.py"),
    ("comm/types.py", '"prod": "mul", "max"', '"prod": "add", "max"', "test_comm.py -k all_reduce test_random_operations.py"),
    ("comm/selection.py", "if count <= next(", "if count >= next(", "test_comm.py -k doubled"),
    ("comm/waiting.py", "self.bytes += array.nbytes\n        return self._start", "self.bytes += array.size\n        return self._start", "test_timeline.py test_data_parallel.py -k payload"),
    ("gradients/buckets.py", "self.length = -(-sum(sizes) // ranks)", "self.length = -(-sum(sizes) // ranks) + 1", "test_accounting.py -k formula"),
    ("gradients/buckets.py", "limit = first_cap if buckets and bucket is buckets[0] else cap", "limit = cap", "test_data_parallel.py"),
    ("gradients/reducer.py", "self._missing[b].discard(parameter)", "self._missing[b].clear()", "test_parity.py -k [DataParallel-"),
    ("gradients/precision.py", "self._good = 0\n            self._patience -= 1", "self._good = 0", "test_training.py -k scale"),
    ("gradients/precision.py", "master.grad.div_(scale)", "master.grad.mul_(scale)", "test_training.py test_zero.py -k bfloat16"),
    ("gradients/reducer.py", "self.average.add_(shard)", "self.average.copy_(shard)", "test_parity.py -k ZeroOptimizer"),
    ("gradients/reducer.py", "weight=1 / self.comm.size", "weight=1.0", "test_parity.py -k [DataParallel-"),
    ("gradients/reducer.py", "parameter.grad = view if is_used else None", "parameter.grad = view", "test_parity.py -k [DataParallel-"),
    ("parallel/data/full.py", "return max(rank for rank, has_batch", "return min(rank for rank, has_batch", "test_data_parallel.py -k join"),
    ("parallel/zero/plain.py", "if all(parameter.grad is not None for", "if any(parameter.grad is not None for", "test_parity.py -k 'plain and Stage' test_plain.py -k zero"),
    ("parallel/zero/plain.py", "unit.module.zero_grad()\n        unit.shard.grad", "unit.shard.grad", "test_parity.py -k 'plain and Stage' test_plain.py -k zero"),
    ("parallel/tensor/functions.py", "lambda gradient: back(gradient, comm)", "lambda gradient: gradient", "test_parity.py -k language"),
    ("parallel/tensor/cross_entropy.py", "(targets < first + logits.shape[-1])", "(targets <= first + logits.shape[-1])", "test_tensor.py -k entropy"),
    ("parallel/pipeline/interpreter.py", "[size / sum(sizes) for size in sizes]", "[1 / len(sizes) for size in sizes]", "test_parity.py -k pipeline"),
    ("parallel/replicator/optimizer.py", "parameter.grad = gradient if is_used else None", "parameter.grad = gradient", "test_replicator.py -k agree"),
    ("schedule/orders.py", "ahead = (v - 1) * p + 2 * (p - rank - 1)", "ahead = (v - 1) * p + (p - rank - 1)", "test_schedule.py"),
    ("schedule/simulation.py", "if need.stage % ranks != rank else 0.0)", "if need.stage % ranks == rank else 0.0)", "test_schedule.py"),
    ("schedule/checking.py", "return index <= at[receiver] + lookahead", "return index <= at[receiver] + lookahead + 1", "test_schedule.py"),
    ("theory/zero.py", "return min(max(size - rank * length, 0), length)", "return min(size - rank * length, length)", "test_theory.py test_accounting.py"),
    ("theory/collectives.py", "lowest = me & -me or 1 << log2_up(ranks)", "lowest = me & -me or 1 << (ranks.bit_length() - 1)", "test_theory.py"),
    ("measure/storages.py", "max(stop, merged[-1][1])", "stop", "test_accounting.py -k 'view or memory'"),
    ("measure/trace.py", "float(reading[0]) - asked - took / 2", "float(reading[0]) - asked + took / 2", "test_timeline.py -k 'clocks or round_trip'"),
    ("checkpoint/folder.py", "flat[low - start : high - start] =", "flat[low - first : high - first] =", "test_checkpoint.py -k 'another_stage'"),
    ("checkpoint/loading.py", "if len(files) == comm.size:", "if len(files) >= comm.size:", "test_checkpoint.py -k random"),
    ("training/rates.py", "return max(0.0, left / max(1.0,", "return max(0.0, left / max(2.0,", "test_training.py"),
    ("training/engine.py", "(self._scale.scale / self.gradient_accumulation_steps())", "self._scale.scale", "test_parity.py -k initialize"),
    ("gradients/reducer.py", "if differs[0]:", "if False:", "test_data_parallel.py -k one_more_forward"),
    ("parallel/zero/optimizer.py", "if self._reduced < self._reducer.passes or not all(", "if not all(", "test_zero.py -k after_the_gradients"),
    ("gradients/reducer.py", "if b < self._launched:", "if False:", "test_data_parallel.py -k lost"),
    ("gradients/reducer.py", "self.root_buffers.stale = True", "pass", "test_data_parallel.py -k buffers"),
    ("gradients/reducer.py", "[now or then for", "[now for", "test_zero.py -k by_hand"),
    ("gradients/reducer.py", "or self.shards.padding or not _is_alone(first, self.dtype):", "or self.shards.padding:", "test_zero.py"),
    ("gradients/reducer.py", "                parameter.grad = None\n            if gradient", "                pass\n            if gradient", "test_accounting.py -k data_parallelism_holds"),
    ("parallel/data/hooks.py", "flat.copy_(average.view(-1))", "pass", "test_compression.py"),
    ("parallel/zero/sharded_bucket.py", "self.keep(parameter)  # it", "pass  # it", "test_zero.py -k by_hand"),
    ("parallel/zero/sharded/unit.py", "                flat.begin()\n", "                pass\n", "test_sharded.py -k add_up"),
    ("horovod/optimizer.py", "self.weight, free=False)", "self.weight)", "test_horovod_optimizer.py -k buckets_leave"),
    ("horovod/optimizer.py", "1 / size() if op == Average else 1.0", "1.0", "test_horovod_optimizer.py -k some_ranks"),
    ("gradients/shard_info.py", "_handles[parameter].remove()", "pass", "test_horovod_optimizer.py -k wrong_order"),
    ("horovod/operations.py", "else \"trunc\"", "else \"floor\"", "test_horovod.py -k allreduce"),
    ("world/mesh.py", "for axis, size in reversed(shape.items()):", "for axis, size in shape.items():", "test_mesh.py test_hybrids.py"),
    ("pi/__init__.py", "min(a + block, stop)", "a + block", "test_pi.py"),
    ("lab/checks/judging.py", "key=lambda problem: (problem.mistake == \"waited\"", "key=lambda problem: (problem.mistake != \"waited\"", "test_check.py -k missing test_wrong_answers.py -k own_reason"),
    ("comm/types.py", "return np.asarray(_Memory(tensor, pointer, CODES[name], strides))", "return tensor.detach().numpy() if name == 'float32' else np.asarray(_Memory(tensor, pointer, CODES[name], strides))", "test_comm.py -k owners"),
    ("comm/pieces.py", "range(0, flat.size + 1, largest)", "range(0, flat.size, largest)", "test_comm.py -k messages_that_are_cut"),
    ("comm/waiting.py", "self._cut = True", "self._cut = False", "test_comm.py -k messages_that_are_cut"),
    ("comm/torch/reductions.py", "if tensor.is_conj():", "if False:", "test_backend.py -k conjugate"),
    ("comm/torch/backend_work.py", "self._future = _Future(self._complete_future, devices)", "self._future = torch.futures.Future(devices=devices)", "test_backend.py -k fsdp2_and_zero"),
    ("storage/readers.py", "if not (known and self._is_followed(file, at, number)):", "if not known:", "test_storage.py -k 'longer_number and tar'"),
    ("storage/parquet.py", "if (size := self.files.size(name)) != (wanted :=", "if (size := self.files.size(name)) < (wanted :=", "test_storage.py -k longer_number"),
    ("gradients/preconditions.py", "parameter.grad = parameter.grad.as_subclass(UnaveragedGradient)", "pass", "test_plain.py -k zero_refuses"),
    ("parallel/pipeline/checks.py", 'if reductions[-1] != "mean":', 'if False:', "test_plain.py -k pipeline_refuses"),
    ("parallel/pipeline/checks.py", "if any(norms) and microbatches > 1:", "if False:", "test_plain.py -k pipeline_refuses"),
    ("parallel/pipeline/checks.py", "if first != rank and name != its_name and", "if False and", "test_plain.py -k pipeline_refuses"),
    ("parallel/pipeline/plain.py", "        sending = [work for work in sending if not work.is_completed()]\n", "", "test_pipeline_memory.py -k plain"),
    ("parallel/pipeline/plain.py", "        del x, y ", "        pass ", "test_pipeline_memory.py -k plain"),
    ("parallel/pipeline/plain.py", "= x, get_gradient_edge(y)", "= x, y", "test_pipeline_memory.py -k plain"),
    ("parallel/pipeline/stage.py", "self.sending.remove(handle)", "pass", "test_pipeline_memory.py -k a_pipeline"),
    ("parallel/pipeline/stage.py", "loss.detach().clone()", "loss.detach()", "test_pipeline_memory.py -k a_pipeline"),
    ("parallel/tensor/plain.py", "        dist.all_reduce(x := x.clone(), group=group)\n", "        ctx.x = x\n        dist.all_reduce(x := x.clone(), group=group)\n", "test_parallel_memory.py -k tensor"),
    ("parallel/context/plain.py", "        ctx.rest = group, causal, order\n", "        ctx.rest, ctx.last = (group, causal, order), scores\n", "test_parallel_memory.py -k ring"),
    ("parallel/expert/plain.py", "ctx.rest = group, received, sent", "ctx.rest, ctx.x = (group, received, sent), x", "test_parallel_memory.py -k experts"),
    ("parallel/pipeline/checks.py", "not all(isinstance(note[1], int) for note in notes) or ", "", "test_plain.py -k pipeline_refuses"),
    ("parallel/tensor/checks.py", 'check_width(x, self.weight.shape[1], takes)', "None", "test_plain.py -k tensor_parallel_layers_refuse"),
]  # fmt: skip


TIERS = "not slow and not nightly"  # of the tests that run


def planted(tree: Path, number: int) -> str | None:
    """Run the tests with one mistake; returns the first test that fails, None where all pass."""
    name, right, wrong, tests = MUTATIONS[number]
    path = tree / "dtlib" / name
    text = path.read_text()
    if text.count(right) != 1:
        raise SystemExit(f"{number}: {name} has {text.count(right)} times {right!r}: fix tests/mutations.py.")
    path.write_text(text.replace(right, wrong))
    try:
        for selection in runs(tests):
            command = [sys.executable, "-m", "pytest", "-xq", "-m", TIERS, "-p", "no:cacheprovider", *selection]
            ran = subprocess.run(
                command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True
            )
            if ran.returncode == 1:
                return next(line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
            if ran.returncode != 0:
                raise SystemExit(
                    f"{number}: {' '.join(selection)} ran no test:\n{ran.stdout[-2000:]}{ran.stderr[-500:]}"
                )
        return None
    finally:
        path.write_text(text)


def hasten(ranks: Path) -> None:
    """Have tests run on three ranks where they run on several numbers of ranks, and a hang end after a short while."""
    text = ranks.read_text()
    for before, after in (
        ("TIME_LIMIT = 300  #", "TIME_LIMIT = 20  #"),
        ("    params = [", "    sizes = [3] if 3 in sizes and 3 not in (*slow, *nightly) else sizes\n    params = ["),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    ranks.write_text(text)


def runs(tests: str) -> list[list[str]]:
    """``a.py -k word b.py`` as the arguments of one run of pytest a file."""
    selections = []
    for word in tests.replace("'", "").replace(" -k ", "\n-k\n").replace(" test_", "\ntest_").split("\n"):
        if word.startswith("test_"):
            selections.append([f"tests/{word}"])
        else:
            selections[-1].append(word)
    return selections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    parser.add_argument("--all-sizes", action="store_true")
    options = parser.parse_args()
    wanted = [n for text in options.numbers for n in range(int(text.split("-")[0]), int(text.split("-")[-1]) + 1)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "tests", "__pycache__", ".*_cache"))
        shutil.copytree(options.tests, tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        if not options.all_sizes:
            hasten(tree / "tests" / "ranks.py")
        for number in wanted or range(len(MUTATIONS)):
            began = time.monotonic()
            failed = planted(tree, number)
            missed += failed is None
            name, _, wrong, _ = MUTATIONS[number]
            noticed = f"noticed: {failed:.110}" if failed else f"NOT NOTICED: {wrong!r}"
            print(f"{number:2d} {name:34s} {time.monotonic() - began:5.1f} s  {noticed}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
