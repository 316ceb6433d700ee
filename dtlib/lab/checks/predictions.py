"""Predictions: a guess before the run, compared with what came."""

from numbers import Number


def predict(guess, came, tolerance: float = 0.0, hint: str = "") -> None:
    """Compare a prediction with what came.

    Args:
        guess: the prediction, a number or any value; None if it has not been made.
        came: what the run gave.
        tolerance: how far off a numeric guess may be to count as right, as a fraction of ``came``.
        hint: what to think about if it was wrong.
    """
    shown = f"{came:.4g}" if isinstance(came, float) else f"{came}"
    if guess is None:
        print("Predict first: replace None by your guess, run that cell, then this one.")
    elif isinstance(came, Number) and not isinstance(guess, Number):
        print(f"Predict a number, without quotes: you wrote {guess!r}.")
    elif guess == came or (tolerance and abs(guess - came) <= tolerance * abs(came)):
        print(f"You predicted {guess}, and it came out as {shown}: right.")
    else:
        print(f"You predicted {guess}, and it came out as {shown}. {hint}".rstrip())
