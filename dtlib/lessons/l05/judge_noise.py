"""Lesson 05: check of the noise scale of a gradient, on made-up gradients; recognises typical mistakes."""

import math

from dtlib.lab.checks.exercise import Exercise, rows

CASES = ((4, 50, 3.0), (16, 400, 0.5), (2, 8, 0.1))  # (samples per rank, elements, noise)


def made(case: int, rank: int):
    """Return the made-up gradient of a rank: a part common to all ranks, plus noise of its samples."""
    import torch

    _, count, apart = CASES[case]
    common, own = (torch.Generator().manual_seed(100 * case + number) for number in (99, rank))
    return torch.randn(count, generator=common).double() + apart * torch.randn(count, generator=own).double()


def observe(noise_scale, comm):
    """Return for each case the result (a number, or text), and whether the gradient is unchanged."""
    seen = []
    for case, (samples, *_) in enumerate(CASES if comm.size > 1 else ()):
        gradient = made(case, comm.rank)
        seen.append((_number(noise_scale(comm, gradient, samples)), gradient.equal(made(case, comm.rank))))
    return seen


def _number(value):
    try:
        if not isinstance(value, (str, bool)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    return f"{value!r:.60}"


def scale(small: float, large: float, few: float, many: float) -> float:
    """Return the noise scale from squared lengths of gradients of few and of many samples.

    The result is infinite if the numbers of samples are equal, or the true gradient is zero. S. McCandlish et al.,
    arXiv:1812.06162, appendix A.1.
    """
    if few == many:
        return math.inf
    noise = (small - large) / (1 / few - 1 / many)
    true = (many * large - few * small) / (many - few)
    return noise / true if true else math.inf


def _lengths(case: int, size: int) -> tuple[list[float], float, int]:
    """Return the squared length of each rank's gradient and of their mean, and the samples per rank."""
    gradients = [made(case, rank) for rank in range(size)]
    mean = sum(gradients) / size
    return [float(g @ g) for g in gradients], float(mean @ mean), CASES[case][0]


def _mistakes(own: float, lengths: list[float], large: float, b: int) -> list:
    """Return (mistake, resulting number, two hints) for each known mistake.

    ``own`` is the squared length of this rank's gradient.
    """
    n, root = len(lengths), math.sqrt
    small = sum(lengths) / n
    truth, noise = (n * b * large - b * small) / (n * b - b), (small - large) / (1 / b - 1 / (n * b))
    divide = "dist.all_reduce adds. Afterwards divide by comm.size."
    return [
        ("own-length", scale(own, large, b, n * b), "Which squared length differs between ranks?",
         "All-reduce the squared lengths too: small is their mean over ranks."),
        ("sum-of-gradients", scale(small, n * n * large, b, n * b), "How long is the gradient of all samples?",
         f"It is the mean of the ranks' gradients, not their sum. {divide}"),
        ("sum-of-lengths", scale(n * small, large, b, n * b), "What is the mean length of the gradient of one rank?",
         f"Use the mean of the squared lengths, not their sum. {divide}"),
        ("sums", scale(n * small, n * n * large, b, n * b), "Both lengths come from sums over ranks.", divide),
        ("not-squared", scale(sum(map(root, lengths)) / n, root(large), b, n * b), "These are not squared lengths.",
         "Both formulas contain squared lengths: gradient @ gradient."),
        ("mean-of-roots", scale((sum(map(root, lengths)) / n) ** 2, large, b, n * b),
         "The mean of squares is not the square of the mean.", "Square each rank's length first; then all-reduce."),
        ("ranks-for-samples", scale(small, large, 1, n), "How many samples do one rank and all ranks have?",
         "b is samples, and B is comm.size * samples."),
        ("rank-for-all", scale(small, large, b, n), "How many samples do all ranks have together?",
         "B is comm.size * samples, not comm.size."),
        ("swapped", scale(small, large, n * b, b), "Which of the two gradients is computed from fewer samples?",
         "The mean over ranks is computed from B samples, the gradient of one rank from b."),
        ("swapped", scale(large, small, b, n * b), "Which of the two gradients is computed from fewer samples?",
         "The mean over ranks is computed from B samples, the gradient of one rank from b."),
        ("upside-down", truth / noise, "Your value falls when the noise grows.", "Return noise / true."),
        ("noise-alone", noise, "This is only the noise, in squared lengths.",
         "Divide by the squared length of the true gradient."),
        ("true-alone", truth, "This is the squared length of the true gradient.", "Return noise / true."),
        ("measured-for-true", noise / large, "The mean gradient contains noise, so it is too long.",
         "Divide by true, the result of the first formula, and not by the squared length of the mean."),
        ("measured-for-true", noise / small, "A rank's gradient contains noise, so it is too long.",
         "Divide by true, the result of the first formula, and not by a measured length."),
        ("root", root(max(0, noise / truth)), "This is the square root of the noise scale.", "Return noise / true."),
    ]  # fmt: skip


def judge(observations) -> None:
    """Check that the number is the same on all ranks, and right."""
    rows(None)("one-rank", len(observations) == 1, "at least two ranks", "one rank",
               "With one rank both lengths are equal: one equation for two unknowns.", "Run lab.engines(3) first.")
    for rank, seen in enumerate(observations):
        for value, _ in seen:
            rows(rank)("type", isinstance(value, str), "one number", f"{value}",
                       "Return the noise scale as a number.", "return noise / true, a number or a one-element tensor.")
    for rank, seen in enumerate(observations):
        rows(rank)("gradient-changed", not all(same for _, same in seen), "the unchanged gradient",
                   "another gradient", "The optimizer needs this gradient. What does dist.all_reduce change?",
                   "All-reduce a copy: gradient.clone().")
    for rank, seen in enumerate(observations):
        lengths = [_lengths(case, len(observations)) for case in range(len(CASES))]
        right = [scale(sum(of) / len(of), large, b, len(of) * b) for of, large, b in lengths]
        got = [value for value, _ in seen]
        if _same(got, right):
            continue
        at = next(case for case in range(len(CASES)) if not _same(got[case : case + 1], right[case : case + 1]))
        wrong = rows(rank, f"{right[at]:.6g} for {len(observations)} ranks with {CASES[at][0]} samples each",
                     f"{got[at]:.6g}")  # fmt: skip
        tried = [_mistakes(of[rank], of, large, b) for of, large, b in lengths]
        for of_cases in zip(*tried, strict=True):
            wrong(of_cases[0][0], _same(got, [value for _, value, *_ in of_cases]), *of_cases[0][2:])
        close = all(abs(x - y) < 0.006 * max(1, abs(y)) for x, y in zip(got, right, strict=True))
        wrong("rounded", close, "This is rounded: return all digits.", "Round only what you print.")
        wrong("other-number", True, "Print both squared lengths, then true and noise. Which value is wrong?",
              "true = (B * large - b * small) / (B - b); noise = (small - large) / (1 / b - 1 / B).")


def _same(got, wanted) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-5) for x, y in zip(got, wanted, strict=True))


EXERCISES = {"noise-scale": Exercise("noise_scale", observe, judge, any_size=True)}
