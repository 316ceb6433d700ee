"""Lesson 07: check of a step of 1F1B with right values but too much memory, by bytes and live tensors."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l07.observe_stages import stage_of

# Features; samples of a micro-batch; samples of one so long that its send waits for the receive.
WIDTH, ROWS, LONG = 8, 8, 2000
# (micro-batches, samples of each). In the last two cases memory outside of torch is counted.
CASES = {"few": (6, ROWS), "many": (24, ROWS), "long": (4, LONG), "longer": (12, LONG)}
NUMBER = 8  # bytes
BORDER = NUMBER * ROWS * WIDTH
FRAMES = 3  # tensors of finished micro-batches to which local variables may still refer
NUMBERS = 4  # numbers that may be kept for each micro-batch: loss, mean, and two more


def make_batch(kind: str) -> list[tuple]:
    """Return input and target of each micro-batch."""
    import torch

    count, samples = CASES[kind]
    generator = torch.Generator().manual_seed(count)
    x, y = torch.randn(2, count, samples, WIDTH, dtype=torch.float64, generator=generator)
    return [(one.clone(), other.clone()) for one, other in zip(x, y, strict=True)]


def reference(kind: str, ranks: int) -> dict:
    """Return gradients and mean absolute outputs by stage, and the loss, computed in one process."""
    from torch.nn.functional import mse_loss

    stages, loss, means = [stage_of(index, WIDTH, WIDTH) for index in range(ranks)], 0.0, [[] for _ in range(ranks)]
    batch = make_batch(kind)
    for x, target in batch:
        for stage, of_stage in zip(stages, means, strict=True):
            x = stage(x)
            of_stage.append(x.detach().abs().mean().item())
        part = mse_loss(x, target) / len(batch)
        part.backward()
        loss += part.item()
    return {"gradients": [_gradient(stage) for stage in stages], "means": means, "loss": loss}


def _gradient(stage) -> list:
    return [value for p in stage.parameters() for value in ([] if p.grad is None else p.grad.flatten().tolist())]


class Watch:
    """A record of the tensors that passed a stage, as weak references."""

    def __init__(self):
        self.finished, self.in_flight, self.alive = [], 0, {}
        self.outputs, self.memory, self.inputs, self.gradients = [], [], [], []

    def passes(self, x, output) -> None:
        """Record the input and output of a forward pass."""
        import torch

        number = len(self.outputs)
        if x.requires_grad and x.is_leaf:
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x.register_post_accumulate_grad_hook(
                lambda leaf: self.gradients.append(weakref.ref(leaf.grad.untyped_storage()))
            )
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: self.finished.append(number))
        self.outputs.append(weakref.ref(output))
        self.memory.append(weakref.ref(output.untyped_storage()))
        self.in_flight = max(self.in_flight, len(self.outputs) - len(self.finished))
        if len(self.outputs) == CASES["many"][0]:
            self.alive = self.look()

    def look(self) -> dict[str, int]:
        """Return the number of live tensors of finished micro-batches, by kind."""
        done = set(self.finished)
        kinds = {"outputs": self.outputs, "memory": self.memory, "inputs": self.inputs}
        alive = {name: sum(some[m]() is not None for m in done if m < len(some)) for name, some in kinds.items()}
        return {**alive, "gradients": sum(one() is not None for one in self.gradients)}


def tracked(inner, watch: Watch):
    """Return a module like ``inner`` that reports to ``watch``, without further attributes."""
    from torch import nn

    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            output = self.inner(x)
            watch.passes(x, output)
            return output

    return Tracked()


@contextmanager
def other_memory() -> Iterator[list[int]]:
    """Return a context whose list gets the peak bytes of Python's and numpy's memory; torch's do not count."""
    import tracemalloc

    ours, found = not tracemalloc.is_tracing(), [0]
    if ours:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield found
        found[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        if ours:
            tracemalloc.stop()


def observe(step, comm) -> list[dict]:
    """Observe ``step(comm, stage, microbatches, like, loss_fn)``: values and sends, then bytes, in each case."""
    from mpi4py import MPI

    from dtlib.errors import WaitTimeout
    from dtlib.lab.checks.pending_handles import count_unfinished, watched_handles
    from dtlib.measure.live import Live

    found = []
    # Each case runs twice: first for values and sends, then with instruments for memory.
    for kind, measured in [(kind, measured) for measured in (False, True) for kind in CASES]:
        case = {"kind": kind, "measured": measured, "count": CASES[kind][0]}
        found.append(case)
        inner = stage_of(comm.rank, WIDTH, WIDTH)
        try:
            if measured and CASES[kind][1] == LONG:
                arguments = _arguments(kind, comm)
                with other_memory() as most:
                    step(comm, inner, *arguments)
                case["other"] = most[0]
            elif measured:
                # Gradients exist before, so that the step does not count them as new memory.
                for parameter in inner.parameters():
                    parameter.grad = parameter.detach() * 0
                stage = tracked(inner, watch := Watch())
                arguments = _arguments(kind, comm)
                with Live() as live:
                    step(comm, stage, *arguments)
                lines = [(count, text) for count, _, text in live.by_line(at_peak=True)]
                case.update(peak=live.peak, lines=lines[:3], in_flight=watch.in_flight, alive=watch.alive)
            else:
                with watched_handles(comm) as handles:
                    got = step(comm, inner, *_arguments(kind, comm))
                    case["sends"] = count_unfinished(handles)
                case["loss"], case["means"] = _numbers(got)
                case["gradient"] = _gradient(inner)
        except (WaitTimeout, MPI.Exception) as error:
            case.update(error=str(error), waited=True)
        except Exception as error:
            case.update(error=f"{type(error).__name__}: {error}", waited=False)
        if "error" in case:
            break  # after an error the communicator cannot be used again
    return found


def _arguments(kind, comm) -> tuple:
    """Return the arguments: inputs on rank 0 only, targets on the last rank only."""
    import torch
    from torch.nn.functional import mse_loss

    first, last = comm.rank == 0, comm.rank == comm.size - 1
    batch = [(x if first else None, target if last else None) for x, target in make_batch(kind)]
    return batch, torch.empty(CASES[kind][1], WIDTH, dtype=torch.float64), mse_loss


def _numbers(got) -> tuple:
    """Return loss and means of an answer as floats, or None for a value that is no number."""
    try:
        loss, means = got
    except (TypeError, ValueError):
        return None, None
    return _as_floats([loss]), _as_floats(means)


def _as_floats(values):
    try:
        return [float(value.detach() if hasattr(value, "detach") else value) for value in values]
    except (TypeError, ValueError, RuntimeError):
        return None


def judge(observations) -> None:
    """Check values, then live tensors of finished micro-batches, then bytes, which must not grow with their number."""
    size = len(observations)
    for number in range(max(map(len, observations))):
        cases = {rank: seen[number] for rank, seen in enumerate(observations) if number < len(seen)}
        _judge_errors(cases)
        if not cases[0]["measured"]:
            _judge_values(cases, reference(cases[0]["kind"], size))
    measured = [{case["kind"]: case for case in seen if case["measured"]} for seen in observations]
    for rank, cases in enumerate(measured):
        _judge_bytes(rank, size, cases["few"], cases["many"], of_last=measured[-1]["many"]["alive"])
    for rank, cases in enumerate(measured):
        _judge_other_memory(rank, cases["long"], cases["longer"])


def _judge_errors(cases) -> None:
    failed = [(case["waited"], rank) for rank, case in cases.items() if "error" in case]
    if not failed:
        return
    waited, rank = min(failed)  # errors are causes, timeouts are effects
    case = cases[rank]
    wrong = rows(rank, "no error", f"{case['error']} ({case['count']} micro-batches, case {case['kind']!r})")
    wrong("long-messages", waited and CASES[case["kind"]][1] == LONG,
          "The step works with short messages. A send of a long message waits for a receive.",
          "Two neighbours wait for each other in a send. Keep async_op=True, and remove a handle after handle.done().")
    wrong("waited", waited, "For which message does this rank wait, and which rank should send it?",
          "Do not change the order of sends and receives.")
    wrong("local-name", case["error"].startswith("UnboundLocalError"),
          "If a function assigns to a name, the name is local. Which list did you mean to change?",
          "sending[:] = ... changes the existing list; sending = ... makes a new one.")
    wrong("raised", True, "The original step works. You removed something that the step needs. What?",
          "A backward pass needs its input and output. Compute the number for the log while the output exists.")


def _judge_values(cases, truth) -> None:
    count = cases[0]["count"]
    for rank, case in cases.items():
        wrong = rows(rank, f"the values of the original step, with {count} micro-batches")
        wrong("other-gradient", not _close(case["gradient"], truth["gradients"][rank]),
              "other gradients of this stage" if case["gradient"] else "no gradients of this stage",
              "The original step had the right gradients. Which computation uses other values now?",
              "Each micro-batch has one forward and one backward pass: kept[m] has its input and its output.")
        wrong("no-means", not case["means"] or len(case["means"]) != count,
              f"{'no' if not case['means'] else len(case['means'])} means of outputs, of {count} micro-batches",
              "The log is still necessary: one number for each micro-batch. Where do you compute it?",
              "return sum(losses), and a list with the mean of output.abs() for each micro-batch.")
        wrong("other-means", not _close(case["means"], truth["means"][rank]), "other means of outputs",
              "The log needs the mean of the stage's output, in its dtype. Of which tensor is your mean?",
              "output.detach().abs().mean()")
        if rank == max(cases):
            wrong("other-loss", not _close(case["loss"], [truth["loss"]]), "another loss",
                  "The loss is the mean over the batch.", "return sum(losses), ...")
    for rank, case in cases.items():
        open_, started = case["sends"]
        wrong = rows(rank, "a completed handle for every send: handle.done() or handle.wait()")
        wrong("not-waited", open_, f"{open_} of {started} sends without a check of completion",
              "MPI may still read a tensor that is being sent. How do you know when you may free it?",
              "Remove a handle only if handle.done(), a method, returns True. At the end wait for the others.")


def _close(some, others) -> bool:
    pairs = zip(some or [], others, strict=False)
    return bool(some) and len(some) == len(others) and all(abs(a - b) <= 1e-9 * (1 + abs(b)) for a, b in pairs)


def _judge_bytes(rank: int, size: int, few: dict, many: dict, of_last: dict) -> None:
    more, alive = many["count"] - few["count"], many["alive"]
    if not alive:
        raise Wrong("stage-not-called", rank, f"{many['count']} forward passes through the stage", "fewer",
                    "Run each micro-batch through the stage once.", "output = stage(x)")
    wrong = rows(rank)
    wrong("in-flight", many["in_flight"] > size - rank, f"at most {size - rank} micro-batches in flight, as in 1F1B",
          f"{many['in_flight']}", "You changed the order of passes. The order is not the cause of the leak. What is?",
          "First one forward pass for each rank after this one; then alternate one forward and one backward pass.")
    nothing = "no tensor of a micro-batch after its backward pass"
    wrong("output-held", alive["outputs"] > FRAMES, nothing,
          f"{alive['outputs']} outputs of finished micro-batches exist at the last micro-batch",
          "`output = stage(x)` allocates them. What still refers to an output after its backward pass?",
          "A lambda keeps all variables that it names while it exists. A list and a dictionary keep their entries, "
          "and a number that is not detached keeps its graph. Which of these leads to an output?",
          "Compute the number immediately, from output.detach(); and remove kept[m] with pop.")
    wrong("detached-held", alive["memory"] > FRAMES and of_last.get("memory", 0) > FRAMES, nothing,
          f"the memory of {alive['memory']} outputs of finished micro-batches exists, although the outputs do not",
          "output.detach() shares its memory. Which line keeps it, even on the last rank, which sends no output?",
          "The log needs one number of each output, and no tensor or function: compute this number immediately.")
    wrong("memory-of-outputs", alive["memory"] > FRAMES, nothing,
          f"the memory of {alive['memory']} outputs of finished micro-batches exists, although the outputs do not",
          "output.detach() is another tensor with the same memory. What refers to it, on all ranks except the last?",
          "A handle keeps the tensor that it sends. And the list keeps the handle.",
          "After each pass: sending[:] = [handle for handle in sending if not handle.done()].")
    wrong("inputs-held", alive["inputs"] > FRAMES, nothing, f"{alive['inputs']} inputs of finished micro-batches exist",
          "`torch.empty_like(like)` allocates them. Which dictionary, list or graph still refers to one?",
          "kept.pop(m) removes an entry, kept[m] does not. A loss with a graph keeps its input.")
    wrong("memory-of-gradients", alive["gradients"] > FRAMES, nothing,
          f"{alive['gradients']} gradients of inputs exist after they were sent",
          "The stage before receives x.grad. What still keeps this tensor after the send?",
          "Remove handles of both directions when handle.done(), also the handles of gradients.")
    # The peak may grow by a few numbers per micro-batch, and by tensors that local variables still refer to.
    most = few["peak"] + more * NUMBERS * NUMBER + FRAMES * BORDER
    lines = "; ".join(f"{count:,} of `{text}`" for count, text in many["lines"])
    wrong("grows", many["peak"] > most,
          f"at most {few['peak']:,} bytes with {few['count']} micro-batches, and hardly more with {many['count']}",
          f"{many['peak']:,}; the largest: {lines}",
          "For each micro-batch you keep memory as large as its tensors. Look at these lines.",
          "A copy needs memory too. For a log keep numbers, not tensors; and remove completed handles.")


def _judge_other_memory(rank: int, few: dict, many: dict) -> None:
    more = many["count"] - few["count"]
    rows(rank)("other-memory", many["other"] - few["other"] > more * NUMBER * LONG * WIDTH // 4,
               f"no more memory with {many['count']} micro-batches of {LONG} samples than with {few['count']}",
               f"{many['other'] - few['other']:,} bytes more, in arrays or in Python's own objects",
               "You keep no tensor, but an object of similar size for each micro-batch. What is it?",
               "An array, or a list of numbers or bytes, needs memory too. Keep only the mean of each output.")


EXERCISES = {
    "leak-fix": Exercise("lean_step", observe, judge, any_size=True),
}
