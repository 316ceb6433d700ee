"""Lesson 07: checks of pipeline steps by values, order of actions, messages, and memory of autograd."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l07 import judge_order as order
from dtlib.lessons.l07.judge_gradients import backwards_of, judge_values
from dtlib.lessons.l07.judge_order import actions_of, words_of
from dtlib.lessons.l07.observe_stages import LONG, observe_batch, observe_microbatches, reference

NO_LOSS = ("Add up the scaled losses, and return the sum.", "return sum(losses), as the last line, outside of any if.")
ONE_EACH = (
    "Call backward once for each micro-batch.",
    "Not on the sum of all losses: on each, scaled.",
)


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
                            words_of(case),
                            "The clock of GPipe: which pass may begin only when the last micro-batch has gone forward?",
                            "Two loops, one after the other: one over forward passes, one over backward passes.")
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
        wrong("collective-inside", others, "send and recv alone", ", ".join(sorted(others)),
              "Does any rank but a neighbour need the loss?", "None does: use comm.send and comm.recv alone.")
        wrong("loss-elsewhere", rank < last and any(entry[0] == "L" for entry in case["log"]),
              f"loss_fn on rank {last} alone", f"a call of loss_fn on rank {rank}",
              "Which rank has the output of the whole model?",
              "With more than two ranks there are some in the middle: they are neither first nor last, and "
              "receive and send in both directions.")
        neighbours = (rank - 1, rank + 1)
        far = next((dest for name, dest, *_ in case["log"] if name == "send" and dest not in neighbours), None)
        wrong("not-a-neighbour", far is not None, "messages to neighbours", f"one to rank {far}",
              "Activations go to rank + 1, gradients to rank - 1.",
              "To which ranks does a rank in the middle send? To these two alone: the ranks form no ring.")
    for rank, case in sorted(cases.items()):
        if ("F", None) in case["log"] or ("R", None) in case["log"]:
            raise Wrong("other-input", rank, "inputs that are the outputs of the stage before",
                        "an input with other values",
                        "Has the message arrived when the stage computes? And is it what the stage before gave?",
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
        first = "A tensor that was received is not part of a graph. Who wants its gradient must say so first."
        if (done := backwards_of(case)) and done != list(range(len(done))):
            first = (
                f"The backward pass was that of micro-batch {done[-1]}: is it the gradient of its input that is sent?"
            )
        wrong("no-input-gradient", True, "the gradient of what this rank has received", got, first,
              "x.requires_grad_() before stage(x); afterwards send the .grad of that tensor, and of no other.")
    wrong("long-messages", waited and kind == "long", f"no hang with micro-batches of {LONG:,} samples", got,
          "Short messages leave at once, long ones wait until somebody receives them. Does the rank that should "
          "receive this one send, at that moment, too?",
          "Find the two neighbours that wait for one another: both stand in a send, or each in a recv for a "
          "micro-batch that the other sends later.",
          "Send with async_op=True, keep the handles, and wait for them at the end: handle.wait().")
    wrong("few-microbatches", kind == "few", f"a step with {case['M']} micro-batches on {len(cases)} ranks", got,
          "There may be fewer micro-batches than ranks.",
          "The number of forward passes that come first is at most the number of micro-batches.")
    wrong("uneven", kind == "uneven", "a step whose last micro-batch is smaller", got,
          "Micro-batches need not be equal: which size does the code take for granted?",
          "Receive activations into inputs[m], and gradients into torch.empty_like(output) of micro-batch m.")
    wrong("waited", waited, "a send for every receive", got,
          "Read from this rank on: what does it wait for, who should send it, and what does that rank wait for?",
          "Forward: receive from rank - 1, compute, send to rank + 1. Backward: receive from rank + 1, compute, send "
          "to rank - 1. Rank 0 and the last rank leave out what has no neighbour.")
    wrong("raised", True, "no error", got,
          "The passes so far tell where it happened. Rank 0 has nobody before it, and the last rank nobody behind it.",
          "Print comm.rank and the shapes before the pass that comes next; with one rank nothing is sent at all.")


def _described(case) -> str:
    return f"{case['M']} micro-batch{'es' * (case['M'] > 1)}, case {case['kind']!r}"


def _judge_forwards(cases) -> None:
    """Check that each micro-batch passes each stage forward once, with the values of the previous stage."""
    for rank, case in sorted(cases.items()):
        forwards = [microbatch for kind, microbatch in actions_of(case) if kind == "F"]
        expected = f"{case['M']} forward passes through the stage, one for each micro-batch"
        wrong = rows(rank, expected)
        wrong("no-forward", not forwards, "none", "Where is stage(x) called?",
              "for m, x in enumerate(inputs): receive into x (but on rank 0), output = stage(x), send it on.")
        wrong("no-microbatches", "all" in forwards and case["M"] > 1, "one, with the whole batch",
              "The values are the same. But what do the other ranks do meanwhile?",
              "Let each micro-batch pass the stage by itself.")
        if len(forwards) != case["M"] or set(forwards) != set(range(case["M"])):
            wrong("other-microbatches", None in forwards, f"{len(forwards)} with other samples",
                  f"The batch is cut into {case['M']} micro-batches: is that number still there?",
                  "What is wrong is a division. Leave the samples of a micro-batch as they are.")
            wrong("forward-count", True, words_of(case), "Does each micro-batch pass the stage, once?",
                  "Who computes a pass again before it goes backward, computes the first one under torch.no_grad().")


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
    what = f"{expected:.6g}, the mean loss of the batch, returned on the last rank"
    wrong = rows(last, what)
    wrong("no-loss", got is None, "no number", *NO_LOSS)
    # "not <=" is also true for NaN.
    wrong("other-loss", not abs(got - expected) <= 1e-6 * abs(expected), f"{got:.6g}",
          "The gradients are right. The loss of the batch is the sum of the losses as they were scaled for them.",
          "losses.append(loss * len(x) / samples), then return sum(losses), on the last rank.")


def _judge_waits(cases) -> None:
    for rank, case in sorted(cases.items()):
        open_, started = case["sends"]
        if open_:
            raise Wrong(
                "not-waited", rank, "a wait() for each send that is started with async_op=True",
                f"{open_} of {started} sends that nobody waits for ({_described(case)})",
                "The values are right. But when may a tensor that is being sent be changed, or its memory used again?",
                "Keep the handles in a list, and at the end: for handle in sending: handle.wait().")


EXERCISES = {
    "pipeline-fix": Exercise("train_step", observe_batch, judge_loss, any_size=True),
    "gpipe-build": Exercise("my_gpipe", observe_microbatches, judge_gpipe, any_size=True),
    "1f1b-build": Exercise("my_1f1b", observe_microbatches, judge_1f1b, any_size=True),
}
