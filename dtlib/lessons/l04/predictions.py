"""Lesson 04: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction


def _hidden(timeline) -> int:
    """Return the number of all_reduces of rank 0 that ended before its backward pass ended."""
    mine = [event for event in timeline.events if event.rank == 0]
    computed = max(event.end for event in mine if event.kind == "phase")
    return sum(event.end < computed for event in mine if event.name == "all_reduce")


def _before_the_first(timeline) -> int:
    """Return the number of layers that rank 0 had computed when its first all_reduce began."""
    mine = [event for event in timeline.events if event.rank == 0]
    first = min(event.start for event in mine if event.name == "all_reduce")
    return sum(event.end <= first for event in mine if event.kind == "phase")


PREDICTIONS = {
    "bytes-of-the-server": Prediction(
        got=lambda sent_bytes: {"sent": sent_bytes[0][0], "received": sum(server for server, _ in sent_bytes[1:])},
        hint="Each of three workers gets all weights, and sends all gradients.",
    ),
    "same-as-rate": Prediction(
        got=lambda gaps: min(gaps[0], key=gaps[0].get), tolerance=1e-9, hint="The sum is four times the mean."
    ),
    "serial-script": Prediction(
        got=lambda: {"batch size": 4 * 24, "rate": 4 * 0.02},
        tolerance=1e-9,
        hint={"batch size": "The mean is over the images of all ranks.", "rate": "Look at the fourth change."},
    ),
    "first-layer-to-come": Prediction(got=lambda layers: layers[0][0], hint="Backward: last layer first."),
    "hidden-buckets": Prediction(
        got=lambda with_thread: _hidden(with_thread),
        hint="When the last bucket is full, there is nothing left to compute. A busy machine hides fewer buckets.",
    ),
    "accumulation-steps": Prediction(got=lambda steps: steps[0], hint="96 = 12 x steps x 4 ranks."),
    # The appendix
    "all-reduces-of-four-passes": Prediction(
        got=lambda calls: calls[0], hint="Inside `no_sync()` nothing is sent. How many passes are outside?"
    ),
    "best-bucket": Prediction(
        got=lambda best, seconds: {min(seconds): "smallest", max(seconds): "largest"}.get(best, "between"),
        choices=("smallest", "largest", "between"),
        hint="Small buckets cost time; large ones do, too.",
    ),
    "layers-before-the-first-bucket": Prediction(
        got=lambda reversed_order: _before_the_first(reversed_order),
        hint="Which layer's gradient is sent first, and when is it ready?",
    ),
    # The exercises
    "parameters-of-the-net": Prediction(
        got=lambda counted: counted[0][0], hint="Inputs x outputs, and a bias for each output."
    ),
    "bytes-with-a-ring": Prediction(
        got=lambda counted: counted[0][1], tolerance=1e-3, hint="2 (N-1)/N of the gradient."
    ),
    "bytes-of-two-workers": Prediction(got=lambda counted: counted[0][2], hint="It sends its weights to two workers."),
}
