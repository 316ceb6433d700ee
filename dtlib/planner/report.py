"""The rows of the tables of `dtlib plan`: the best plans, a map of meshes that fit, and the details of one plan."""

from dtlib.planner.calibrated import MEMORY_ERROR
from dtlib.planner.estimate import Estimate, rounded
from dtlib.planner.model import GIB
from dtlib.planner.runs import days_of

HEADERS = ("", "plan", "step, s", "from", "to", "tokens/s", "MFU", "GiB")


def best_rows(best: list[Estimate]) -> list[tuple]:
    """Return a row for each plan.

    ``1=`` marks plans whose band overlaps the band of the fastest plan. ``~`` marks times outside the measured range.
    """
    rows = []
    for place, e in enumerate(best, 1):
        tied = e.low <= best[0].high and ties(best) > 1
        rows.append(("1=" if tied else str(place), str(e.plan), time_of(e), e.said(e.low), e.said(e.high), *_rates(e)))
    return rows


def ties(best: list[Estimate]) -> int:
    """Return the number of plans whose band overlaps the band of the fastest plan, which is included."""
    return sum(e.low <= best[0].high for e in best)


def _rates(e: Estimate) -> tuple[str, str, str]:
    tokens, percent = e.tokens / 1e3, 100 * e.mfu
    if e.outside:
        return f"~{float(rounded(tokens)):,.0f} k", f"~{rounded(percent)}%", f"{e.memory.total / GIB:.1f}"
    return f"{tokens:,.0f} k", f"{percent:.0f}%", f"{e.memory.total / GIB:.1f}"


def time_of(e: Estimate) -> str:
    """Format the seconds per step, with ``~`` if the plan is outside the measured range."""
    return "~" * bool(e.outside) + e.said(e.seconds)


def map_rows(tried: list[Estimate]) -> tuple[list[tuple], tuple]:
    """Return rows and headers of a map of meshes: a row for each tensor axis, and a column for each pipe axis.

    A cell has the seconds of the fastest plan that fits, or the GiB of the smallest plan.
    """
    cells = {}
    for e in reversed(tried):  # the best plan is last, so it replaces the others
        cells[e.plan.tensor, e.plan.pipe] = time_of(e) + " s" if e.fits else f"no: {e.memory.total / GIB:.0f} GiB"
    tensors, pipes = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    rows = [(f"tensor {t}", *(cells.get((t, p), "-") for p in pipes)) for t in tensors]
    return rows, ("", *(f"pipe {p}" for p in pipes))


def details(e: Estimate, tokens: float | None = None) -> list[tuple[str, str]]:
    """Return the memory, time and messages of a plan as rows of name and value; with ``tokens``, also days of a run."""
    rows = [("memory", str(e.memory))]
    rows += [("step", ", ".join(f"{name} {took:.2g} s" for name, took in e.parts.items() if took > 0.005 * e.seconds))]
    rows += [("sent a rank, a step", ", ".join(f"{name} {sent / 1e9:.3g} GB" for name, sent in e.sent.items() if sent))]
    if tokens:
        took, low, high = (days_of(s, tokens, e.plan.batch * e.model.seq) for s in (e.seconds, e.low, e.high))
        days = f"{e.said(took)} days ({e.said(low)} to {e.said(high)})"
        rows += [("run", f"{tokens:.3g} tokens: {'about ' * bool(e.outside)}{days}")]
    return rows + [("outside", sentence) for sentence in e.outside]


def summary(best: list[Estimate], tried: list[Estimate]) -> str:
    """Describe the result of a search, or say why nothing fits."""
    if not best:
        return f"None of {len(tried)} meshes fits. The smallest: {tried[0].plan}. {tried[0].why_not}"
    fit = sum(e.fits for e in tried)
    says = [f"{fit} of {len(tried)} meshes of {best[0].plan.gpus} {best[0].device.name} fit."]
    if (tied := ties(best)) > 1:
        says.append(f"1=: {tied} of the shown plans tie, because their times (from, to) overlap those of the fastest.")
    says.append("from, to: nine of ten steps are expected to take a time between these.")
    if any(e.outside for e in best):
        says.append("~: nothing like it was measured; from and to are those of papers on which nothing was fitted.")
    says.append("MFU: useful operations per second, as a share of the GPU's peak in its data sheet.")
    says.append(f"GiB: memory per GPU. Where memory was measured, the planner was {MEMORY_ERROR:.0%} off.")
    return "\n".join(says)
