"""Check of a stage's gradient as a weighted sum of the micro-batches' gradients."""

from dtlib.lab.checks.exercise import Wrong, rows
from dtlib.lessons.l07.observe_stages import Reference, reference

BACK = "After the backward pass of m send inputs[m].grad. Call output.backward(gradient) with the received gradient."
ONCE = ("Run one backward pass for each micro-batch.",
        "Does a loop start at a wrong index, or do you also add a gradient by hand?")


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
                "no-gradient", rank, what, "parameters with grad None",
                "Did a backward pass reach this stage? Start it at the output of the stage.",
                "loss.backward() on the last rank, output.backward(gradient) with the received one on the others.")
        _judge_gradient([value for one in gradient for value in one], truth, rank, what, cases)


def _judge_gradient(gradient, truth: Reference, rank: int, what: str, cases) -> None:
    """Find the weight of each micro-batch's gradient in ``gradient``, and recognise mistakes from the weights."""
    import torch

    each = torch.stack([gradients[rank] for gradients in truth.gradients], dim=1)
    got, weights = torch.tensor(gradient, dtype=torch.float64), torch.tensor(truth.weights, dtype=torch.float64)
    if _same(got, each @ weights, each):
        return
    if not got.isfinite().all():
        wrong = rows(rank, what)
        wrong("mixed-up", rank < max(cases) and cases[rank]["kind"] != "split", "NaN or infinity",
              "Does backward() use the received gradient? Before recv, torch.empty has arbitrary values.", BACK)
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
    wrong("no-gradient", all(zero), "zeros", "What does the next rank send back?", BACK)
    if any(zero):
        lost = ", ".join(str(m) for m in range(count) if zero[m])
        wrong("microbatch-lost", True, f"nothing of micro-batch {lost}",
              "parameter.grad adds up the gradients of the micro-batches. Does a line set it to zero or overwrite it?",
              "There are as many backward passes as forward passes. Does the loop include the last one?")
    wrong("not-averaged", count > 1 and all(all_of_them),
          f"{count} times as much: the sum of the means of the micro-batches",
          "backward() adds to parameter.grad. What is the sum after all micro-batches?",
          "Before backward() scale each loss by len(x) / (samples of the whole batch).")
    wrong("averaged-twice", count > 1 and all(fraction),
          f"1/{count} of the right one: divided once too often by the number of micro-batches",
          "Which lines divide by the number of micro-batches? Count them all.",
          "The micro-batches' weights add up to 1. Scale each loss once, by its weight, and no gradient.")
    uneven = max(weights) > min(weights)
    alike = uneven and max(found) - min(found) < 1e-6
    wrong("unweighted", alike and abs(sum(found) - 1) < 1e-6,
          "each micro-batch has the same weight, but the last one is smaller",
          "Should a sample in a small micro-batch have a larger weight than other samples?",
          "Scale each loss by len(x) / (samples of the whole batch), not by 1 / (number of micro-batches).")
    if any(two) and all(a or b for a, b in zip(two, ones, strict=True)):
        wrong("counted-twice", True, f"micro-batch {two.index(True)} twice", *ONCE)
    said = ", ".join(f"{value:.3g}" for value in times)
    hint = f"Micro-batches have the weights {said}, but each needs weight 1. Do you use ranks, samples or features?"
    if alike:
        hint = "Every loss has the same scale factor. Does it use the samples of *this* micro-batch?"
    elif uneven and max(found / weights**2) - min(found / weights**2) < 1e-6 * max(found / weights**2):
        hint = "The weight grows with the samples of a micro-batch. Is the loss a sum, and should it be a mean?"
    wrong("scaled", True, f"micro-batches count {said} times", hint,
          "The loss is a mean. Each micro-batch must count once, with the weight len(x) / (samples of the batch).")


def _tell_mixed_up(rank: int, what: str, cases) -> None:
    mine, behind = backwards_of(cases[rank]), backwards_of(cases.get(rank + 1, cases[rank]))
    wrong = rows(rank, what)
    wrong("backward-order", mine != behind,
          f"something else: backward passes in the order {_listed(mine)}, and on rank {rank + 1} {_listed(behind)}",
          "The next rank sends a gradient. For which micro-batch? And for which output does this rank use it?",
          "Messages of one rank arrive in order: all ranks must use the same order of micro-batches.")
    # where the library runs the passes
    wrong("other-loss", cases[rank]["kind"] == "split", "something else: no sum of the gradients of the micro-batches",
          "Is the loss still the mean of squares, over all features of all samples?",
          "(output - target).square().mean(), and nothing else in loss_fn.")
    wrong("mixed-up", True, "something else: no sum of the gradients of the micro-batches",
          "Do the output and the target of a loss belong to the same micro-batch?" if rank == max(cases) else
          "Is the received gradient x.grad of the next stage, for the micro-batch of this backward pass?",
          "Store the input and the output of micro-batch m under the number m until its backward pass.")


def _same(a, b, each) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * (1e-3 + each.abs().max()))


def backwards_of(case) -> list:
    """Return the micro-batches of the backward passes, in order."""
    return [which for kind, which, *_ in case["log"] if kind == "B"]


def _listed(microbatches) -> str:
    return " ".join(map(str, microbatches))
