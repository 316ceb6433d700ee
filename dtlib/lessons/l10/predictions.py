"""Lesson 10: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction


def _furthest(results: dict) -> float:
    """Return the largest difference between runs in the loss of a step."""
    together = zip(*(result["losses"] for result in results.values()), strict=True)
    return max(max(losses) - min(losses) for losses in together)


PREDICTIONS = {
    "accuracy-on-digits": Prediction(
        got=lambda result: result[0]["accuracy"], within=0.02, hint="Handwritten digits are easy: lesson 05."
    ),
    "bytes-at-stage-3": Prediction(
        got=lambda of_stage: of_stage[0][3]["bytes_per_rank"][0] / of_stage[0][0]["bytes_per_rank"][0],
        tolerance=0.02, hint="Stage 3 shares out everything, here between two ranks.",
    ),
    "curves-of-runtimes": Prediction(
        got=lambda of_runtime: "one curve" if _furthest(of_runtime[0]) < 1e-4 else "several",
        choices=("one curve", "several"), hint="The same sums of the same numbers.",
    ),
    "sent-at-stage-3": Prediction(
        got=lambda times: times[0], tolerance=0.02, hint="Three collectives, each of (N - 1)/N of the bytes; N is 2."
    ),
    "best-rouge": Prediction(
        got=lambda tuned: "model" if tuned[0]["rouge_l"] > tuned[0]["lead_rouge_l"] else "lead",
        choices=("model", "lead"), hint="The lead is the article's first sentence.",
    ),
    # The exercises
    "gpus-of-the-listing": Prediction(got=lambda: 12, hint="num_nodes times num_gpus."),
}  # fmt: skip
