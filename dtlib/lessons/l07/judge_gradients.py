"""Check of a stage's gradient as a weighted sum of the micro-batches' gradients."""

from dtlib.lab.checks.exercise import Wrong, rows
from dtlib.lessons.l07.observe_stages import Reference, reference

BACK = "Send inputs[m].grad after the backward pass of m, and call output.backward(gradient) with what was received."
ONCE = ("One backward pass for each.", "Does a loop begin one too early, or is a gradient added by hand as well?")


def judge_values(cases: dict) -> None:
    """Check that each stage has the gradient of the mean loss. ``cases`` has one kind of batch, by rank."""
    size, kind = len(cases), cases[0]["kind"]
    truth = reference(kind, size)
    # Gradients travel from the last rank to the first, so the mistake closest to the last rank is the cause.
    for rank in reversed(range(size)):
        gradient = cases[rank]["gradient"]
        what = f"on stage {rank} the gradient of the mean over the batch, {cases[rank]['M']} micro-batches"
        if any(one is None for one in gradient):
            raise Wrong(
                "no-gradient", rank, what, "parameters whose grad is None",
                "Did a backward pass go through this stage? The first tensor to call backward on is its output.",
                "On the last rank loss.backward(), on the others output.backward(gradient), with what was received.")
        _judge_gradient([value for one in gradient for value in one], truth, rank, what, cases)


def _judge_gradient(gradient, truth: Reference, rank: int, what: str, cases) -> None:
    """Find the weight of each micro-batch's gradient in ``gradient``, and recognise mistakes from the weights."""
    import torch

    each = torch.stack([gradients[rank] for gradients in truth.gradients], dim=1)
    got, weights = torch.tensor(gradient, dtype=torch.float64), torch.tensor(truth.weights, dtype=torch.float64)
    if _same(got, each @ weights, each):
        return
    if not got.isfinite().all():
        _tell_mixed_up(rank, what, cases)
    # Least squares: with which weights do the micro-batches' gradients add up to this gradient?
    found = torch.linalg.lstsq(each, got.unsqueeze(1), driver="gelsd").solution.flatten()
    if not _same(each @ found, got, each):
        _tell_mixed_up(rank, what, cases)
    count, times = len(weights), (found / weights).tolist()
    near = [[abs(value - wanted) < 1e-6 for value in times] for wanted in (0, 1, 2, count, 1 / count)]
    zero, ones, two, all_of_them, fraction = near
    if all(ones):  # right within the precision of float32 weights
        return
    wrong = rows(rank, what)
    wrong("no-gradient", all(zero), "zeros", "What does the rank behind send back?", BACK)
    if any(zero):
        lost = ", ".join(str(m) for m in range(count) if zero[m])
        wrong("microbatch-lost", True, f"nothing of micro-batch {lost}",
              "Gradients of micro-batches add up in parameter.grad: is it set to zero or written over in between?",
              "As many backward passes as forward passes: does the loop reach the last one?")
    wrong("not-averaged", count > 1 and all(all_of_them),
          f"{count} times as much: the sum of the means of the micro-batches",
          "backward() adds to parameter.grad. What does it add up to after all micro-batches?",
          "Before backward() scale each loss by len(x) / (samples of the whole batch).")
    wrong("averaged-twice", count > 1 and all(fraction),
          f"1/{count} of it: divided by the number of micro-batches once too often",
          "Who divides by the number of micro-batches? Count all the places.",
          "The weights of the micro-batches add up to 1: scale each loss by its weight, and nothing else.")
    uneven = max(weights) > min(weights)
    alike = uneven and max(found) - min(found) < 1e-6
    wrong("unweighted", alike and abs(sum(found) - 1) < 1e-6,
          "each micro-batch counts alike, although the last one is smaller",
          "Should the sample of a small micro-batch count more than another?",
          "Scale each loss by len(x) / (samples of the whole batch), not by 1 / (number of micro-batches).")
    if any(two) and all(a or b for a, b in zip(two, ones, strict=True)):
        wrong("counted-twice", True, f"micro-batch {two.index(True)} twice", *ONCE)
    said = ", ".join(f"{value:.3g}" for value in times)
    hint = f"Micro-batches count {said} times, each should count once. Is that a number of ranks, samples or features?"
    if alike:
        hint = "Every loss is scaled by the same number: is it that of the samples of *this* micro-batch?"
    elif uneven and max(found / weights**2) - min(found / weights**2) < 1e-6 * max(found / weights**2):
        hint = "It grows with the samples of a micro-batch: is its loss a sum over them, where a mean is wanted?"
    wrong("scaled", True, f"micro-batches {said} times", hint,
          "The loss is a mean over samples and features; a micro-batch has the weight len(x) / (samples of the batch).")


def _tell_mixed_up(rank: int, what: str, cases) -> None:
    mine, behind = backwards_of(cases[rank]), backwards_of(cases.get(rank + 1, cases[rank]))
    wrong = rows(rank, what)
    wrong("backward-order", mine != behind,
          f"something else: backward passes in the order {_listed(mine)}, and on rank {rank + 1} {_listed(behind)}",
          "The rank behind sends a gradient: of which micro-batch? And which output does this rank use it for?",
          "Messages from one rank arrive in the order in which they were sent: let all ranks go through the "
          "micro-batches in the same order.")
    # where the library runs the passes
    wrong("other-loss", cases[rank]["kind"] == "split", "something else: no sum of the gradients of the micro-batches",
          "Is it still the mean of squares, over all features of all samples?",
          "(output - target).square().mean(), and nothing else in loss_fn.")
    wrong("mixed-up", True, "something else: no sum of the gradients of the micro-batches",
          "Do the output and the target of a loss belong to the same micro-batch?" if rank == max(cases) else
          "Is what arrives the gradient of an input, x.grad, and of the micro-batch whose output goes backward?",
          "Keep input and output of micro-batch m under the number m until its backward pass.")


def _same(a, b, each) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * (1e-3 + each.abs().max()))


def backwards_of(case) -> list:
    """Return the micro-batches of the backward passes, in order."""
    return [which for kind, which, *_ in case["log"] if kind == "B"]


def _listed(microbatches) -> str:
    return " ".join(map(str, microbatches))
