"""Checks of a pipeline step by its order: messages, stored activations, and makespan."""

from dtlib.lab.checks.exercise import Wrong, rows
from dtlib.lessons.l07.observe_stages import make_batch, width
from dtlib.schedule import Action, one_f_one_b, peak_activations, simulate

NUMBER = 8  # bytes of a float64
EXTRA_BYTES = 128  # bytes that a message may have in addition to the tensor


def actions_of(case) -> list[tuple]:
    """Return the forward and backward passes of a rank as (kind, micro-batch), in order."""
    return [entry for entry in case["log"] if entry[0] in ("F", "B")]


def words_of(case) -> str:
    """Return the actions as text, such as ``F0 F1 B0``; ``F?`` has the input of no micro-batch."""
    names = (f"{kind}{'?' if microbatch is None else microbatch}" for kind, microbatch in actions_of(case))
    return " ".join(names) or "nothing"


def judge_messages(cases) -> None:
    """Check for one message per micro-batch and direction, sent before the next action begins."""
    size = len(cases)
    samples = sum(len(x) for x in make_batch(cases[0]["kind"], size)[0])
    for rank, case in cases.items():
        for what, dest, edge in (("activations", rank + 1, rank + 1), ("gradients", rank - 1, rank)):
            if not 0 <= dest < size:
                continue
            sizes = [entry[2] for entry in case["log"] if entry[0] == "send" and entry[1] == dest]
            expected = f"{case['M']} messages with {what} from rank {rank} to rank {dest}"
            wrong = rows(rank)
            wrong("whole-batch", len(sizes) < case["M"], expected, f"{len(sizes)}",
                  f"What can rank {dest} compute while it waits for all micro-batches together?",
                  "Send each result separately, as soon as it is ready.")
            wanted = samples * width(edge) * NUMBER
            wrong("bytes", len(sizes) > 3 * case["M"] or sum(sizes) > wanted + EXTRA_BYTES * case["M"],
                  f"{expected}, {wanted:,} bytes in all", f"{len(sizes)}, {sum(sizes):,} bytes",
                  f"The values are right, but you send more than {what}, or more messages.",
                  "One comm.send for each micro-batch and direction: output.detach() down, inputs[m].grad up.")
            _judge_promptness(case, "F" if dest > rank else "B", rank, dest)


def _judge_promptness(case, kind: str, rank: int, dest: int) -> None:
    """Check that the result of an F (or B) has been sent when the next F (or B) begins.

    The simulation assumes this.
    """
    begun = sent = 0
    for entry in case["log"]:
        sent += entry[:2] == ("send", dest)
        if entry[0] in ("F", "B"):
            if sent < begun:
                raise Wrong("sent-late", rank,
                            f"the result of {kind} is sent to rank {dest} before the next pass starts",
                            f"{entry[0]}{entry[1]} starts when {sent} of {begun} are sent",
                            f"Rank {dest} could start earlier.", "Send directly after you compute.")
            begun += entry[0] == kind


def judge_recomputation(cases) -> None:
    """Check that no forward pass runs twice."""
    for rank, case in cases.items():
        again = [microbatch for kind, microbatch, *_ in case["log"] if kind == "R"]
        if again:
            raise Wrong(
                "recomputed", rank, f"{case['M']} forward passes, one for each micro-batch",
                f"{case['M'] + len(again)}: micro-batch {again[0]} is computed again before its backward pass",
                "The values are right, and you save memory. But what does a step cost with every forward pass twice?",
                "Keep outputs[m] with its graph until the backward pass of m: no torch.no_grad(), no checkpoint().")


def judge_in_flight(cases) -> None:
    """Check the peak number of micro-batches in flight, and of stored tensors."""
    size = len(cases)
    for rank, case in cases.items():
        most = min(size - rank, case["M"])
        peak = peak_activations([[Action(rank, *action) for action in actions_of(case)]])[0]
        wrong = rows(rank, f"at most {most} micro-batches in flight on rank {rank} of {size}")
        wrong("too-many-activations", peak > most, f"{peak}: {words_of(case)}",
              "The values are right. But when does the first backward pass start?",
              "First comm.size - comm.rank - 1 forward passes; then one forward, one backward in turn; then the rest.")
        wrong("activations-kept", case["peak"] > most,
              f"autograd keeps activations of {case['peak']}: {words_of(case)}",
              "The order is right. What still keeps activations after their backward pass?",
              "Without retain_graph=True a backward pass frees them.")
        # One more is allowed, because a local variable may refer to it.
        wrong("outputs-kept", case["outputs"] > most + 1,
              f"{case['outputs']} outputs of the stage exist at the same time",
              "The order is right, and backward() frees the graph. But the output is an activation too.",
              "output = outputs.pop(m) in the backward pass. Send output.detach(), or the handle keeps the graph.")


def judge_makespan(cases) -> None:
    """Check that the observed order, simulated with B = 2 F, is no slower than 1F1B."""
    size, count = len(cases), cases[0]["M"]
    observed = simulate([[Action(rank, *action) for action in actions_of(cases[rank])] for rank in range(size)])
    best = simulate(one_f_one_b(size, count))
    if observed.makespan > best.makespan:
        rank = next(r for r in range(size) if observed.bubble_of_ranks[r] > best.bubble_of_ranks[r])
        raise Wrong(
            "bubble", rank, f"a bubble of {best.bubble:.0%} with {count} micro-batches, as in 1F1B",
            f"{observed.bubble:.0%}: on this rank {words_of(cases[rank])}",
            "There are few activations, but ranks wait. How many micro-batches must be in flight?",
            "First comm.size - comm.rank - 1 forward passes; then one forward, one backward in turn; then the rest.")
