"""Lesson 07: checks of pipeline steps by values, order of actions, messages, and memory of autograd."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l07 import judge_order as order
from dtlib.lessons.l07.judge_gradients import backwards_of, judge_values
from dtlib.lessons.l07.judge_order import actions_of, words_of
from dtlib.lessons.l07.observe_stages import LONG, observe_batch, observe_microbatches, reference

NO_LOSS = ("Add the scaled losses, and return the sum.", "return sum(losses), as the last line, outside of any if.")
ONE_EACH = ("Call backward once for each micro-batch.", "Call it on each scaled loss, not on the sum of all losses.")
UNEVEN = ("Micro-batches may have different sizes. Which line assumes one size?",
          "Receive activations into inputs[m], and gradients into torch.empty_like(output) of micro-batch m.")


def judge_loss(observations) -> None:
    """Check the gradients of the mean loss on every stage, with four micro-batches."""
    cases = _of_number(observations, 0)
    _judge_errors(cases)
    _judge_forwards(cases)
    judge_values(cases)

def judge_gpipe(observations) -> None:
    """Check for all forward passes, then all backward passes, and for prompt messages."""
    for number in range(max(map(len, observations))):
        cases = _of_number(observations, number)
        _judge_step(cases)
        for rank, case in cases.items():
            kinds = "".join(kind for kind, _ in actions_of(case))
            if "BF" in kinds:
                raise Wrong("not-all-forward-first", rank, "all forward passes, then all backward passes",
                            words_of(case), "In GPipe, which pass waits for the forward pass of the last micro-batch?",
                            "Write two loops: first the forward passes, then the backward passes.")
        order.judge_messages(cases)


def judge_1f1b(observations) -> None:
    """Check that rank r has at most p - r micro-batches in flight, and that the step is no slower than 1F1B."""
    for number in range(max(map(len, observations))):
        cases = _of_number(observations, number)
        _judge_step(cases)
        order.judge_recomputation(cases)
        order.judge_in_flight(cases)
        order.judge_makespan(cases)
        order.judge_messages(cases)


def _of_number(observations, number: int) -> dict:
    """Return the observations of one case by rank, without ranks that stopped earlier."""
    return {rank: seen[number] for rank, seen in enumerate(observations) if number < len(seen)}


def _judge_step(cases) -> None:
    _judge_places(cases)
    _judge_errors(cases)
    _judge_forwards(cases)
    judge_values(cases)
    _judge_backwards(cases)
    _judge_loss(cases)
    _judge_waits(cases)


def _judge_places(cases) -> None:
    """Check for actions that no rank may do, whether the step ended or not."""
    last = max(cases)
    for rank, case in cases.items():
        others = {entry[0] for entry in case["log"] if len(entry) == 3} - {"send", "recv"}
        wrong = rows(rank)
        wrong("collective-inside", others, "only send and recv", ", ".join(sorted(others)),
              "Which rank needs the loss, except a neighbour?", "No rank does: use only comm.send and comm.recv.")
        wrong("loss-elsewhere", rank < last and any(entry[0] == "L" for entry in case["log"]),
              f"loss_fn only on rank {last}", f"a call of loss_fn on rank {rank}",
              "Which rank has the output of the whole model?",
              "Call loss_fn only if comm.rank == comm.size - 1; a middle rank is not the last one.")
        neighbours = (rank - 1, rank + 1)
        far = next((dest for name, dest, *_ in case["log"] if name == "send" and dest not in neighbours), None)
        wrong("not-a-neighbour", far is not None, "messages to neighbours", f"one to rank {far}",
              "Activations go to rank + 1, gradients to rank - 1.",
              "To which ranks does a middle rank send? The ranks do not form a ring.")
    for rank, case in sorted(cases.items()):
        if ("F", None) in case["log"] or ("R", None) in case["log"]:
            wrong = rows(rank, "inputs that are the outputs of the previous stage", "an input with other values")
            wrong("uneven", case["kind"] == "uneven", *UNEVEN)  # mpi4py receives fewer values without an error
            wrong("other-input", True,
                  "Has the message arrived before the stage computes? Is it the output of the previous stage?",
                  "comm.recv(inputs[m], comm.rank - 1), then stage(inputs[m]).")


def _judge_errors(cases) -> None:
    failed = [(case["waited"], rank) for rank, case in cases.items() if "error" in case]
    if not failed:
        return
    waited, rank = min(failed)  # errors are causes, timeouts are effects
    case = cases[rank]
    kind, got = case["kind"], f"{case['error']} ({_described(case)}; so far: {words_of(case)})"
    wrong = rows(rank)
    if not waited and "NoneType" in case["error"]:
        first = "A received tensor is not part of a graph. How does autograd know that you need its gradient?"
        if (done := backwards_of(case)) and done != list(range(len(done))):
            first = (
                f"The backward pass was for micro-batch {done[-1]}. Do you send the gradient of its input?"
            )
        wrong("no-input-gradient", True, "the gradient of the tensor that this rank received", got, first,
              "x.requires_grad_() before stage(x); afterwards send the .grad of this tensor.")
    wrong("long-messages", waited and kind == "long", f"no hang with micro-batches of {LONG:,} samples", got,
          "A send of a long message waits for a receive. Does the receiving rank also send at this time?",
          "Find two neighbours that wait for each other: both in a send, or both in a recv of a later message.",
          "Send with async_op=True, store the handles, and wait for them at the end: handle.wait().")
    wrong("few-microbatches", kind == "few", f"a step with {case['M']} micro-batches on {len(cases)} ranks", got,
          "There may be fewer micro-batches than ranks. Does your code need more?",
          "Before the first backward pass, run at most one forward pass per micro-batch.")
    wrong("uneven", kind == "uneven", "a step whose last micro-batch is smaller", got, *UNEVEN)
    wrong("waited", waited, "a send for every receive", got,
          "For which message does this rank wait, which rank should send it, and for what does that rank wait?",
          "Forward: receive from rank - 1, compute, send to rank + 1. Backward: receive from rank + 1, compute, send "
          "to rank - 1. Rank 0 and the last rank skip messages to neighbours that do not exist.")
    wrong("raised", True, "no error", got,
          "The list of passes shows where it happened. Rank 0 has no previous rank, the last has no next rank.",
          "Print comm.rank and the shapes before the next pass. With one rank, nothing is sent.")


def _described(case) -> str:
    return f"{case['M']} micro-batch{'es' * (case['M'] > 1)}, case {case['kind']!r}"


def _judge_forwards(cases) -> None:
    """Check that each micro-batch passes each stage forward once, with the values of the previous stage."""
    for rank, case in sorted(cases.items()):
        forwards = [microbatch for kind, microbatch in actions_of(case) if kind == "F"]
        wrong = rows(rank, f"{case['M']} forward passes through the stage, one for each micro-batch")
        wrong("no-forward", not forwards, "none", "Where do you call stage(x)?",
              "for m, x in enumerate(inputs): receive into x (not on rank 0), output = stage(x), send it.")
        wrong("no-microbatches", "all" in forwards and case["M"] > 1, "one, with the whole batch",
              "The values are the same. But what do the other ranks do in the meantime?",
              "Run each micro-batch through the stage separately.")
        if len(forwards) != case["M"] or set(forwards) != set(range(case["M"])):
            wrong("other-microbatches", None in forwards, f"{len(forwards)} with other samples",
                  f"The batch is cut into {case['M']} micro-batches. Do you change their number?",
                  "The mistake is in a division. Do not change the samples of a micro-batch.")
            wrong("forward-count", True, words_of(case), "Does each micro-batch run through the stage once?",
                  "If you compute a pass again before its backward pass, use torch.no_grad() for the first one.")


def _judge_backwards(cases) -> None:
    for rank, case in sorted(cases.items()):
        if sorted(backwards_of(case)) != list(range(case["M"])):
            expected = f"{case['M']} backward passes through the stage, one for each micro-batch"
            raise Wrong("backward-count", rank, expected, words_of(case), *ONE_EACH)


def _judge_loss(cases) -> None:
    last = max(cases)
    truth = reference(cases[last]["kind"], len(cases))
    expected = sum(loss * weight for loss, weight in zip(truth.losses, truth.weights, strict=True))
    got = cases[last]["loss"]
    wrong = rows(last, f"{expected:.6g}, the mean loss of the batch, returned on the last rank")
    wrong("no-loss", got is None, "no number", *NO_LOSS)
    # "not <=" is also true for NaN.
    wrong("other-loss", not abs(got - expected) <= 1e-6 * abs(expected), f"{got:.6g}",
          "The gradients are right. The loss of the batch is the sum of the same scaled losses. What do you return?",
          "losses.append(loss * len(x) / samples), then return sum(losses), on the last rank.")


def _judge_waits(cases) -> None:
    for rank, case in sorted(cases.items()):
        open_, started = case["sends"]
        if open_:
            raise Wrong("not-waited", rank, "a wait() for each send that is started with async_op=True",
                        f"{open_} of {started} sends without a wait() ({_described(case)})",
                        "The values are right. But when may you change a tensor that is being sent, or reuse its "
                        "memory?", "Store the handles in a list, and at the end: for handle in sending: handle.wait().")


EXERCISES = {
    "pipeline-fix": Exercise("train_step", observe_batch, judge_loss, any_size=True),
    "gpipe-build": Exercise("my_gpipe", observe_microbatches, judge_gpipe, any_size=True),
    "1f1b-build": Exercise("my_1f1b", observe_microbatches, judge_1f1b, any_size=True),
}
