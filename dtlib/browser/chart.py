"""The room with the decision chart: which parallelism to use when."""

from dtlib.lab import decision_chart
from dtlib.lab.tables import Table

TITLE, LESSON = "Which cut when", "11_beyond_one_machine"
SAYS = " ".join(decision_chart.__doc__.partition("\n\n")[2].split())
FORM = ()


def show() -> str:
    """Return the chart as an HTML table."""
    rows = [tuple(cell.replace("\n", " ") for cell in branch) for branch in decision_chart.BRANCHES]
    title = "Answer from top to bottom. Go to the next question if the answer is no, or if the method is not enough"
    table = Table(rows, ("question", "yes, if", "then", "measured in"), title)
    return f"{table._repr_html_()}<p>Otherwise: {decision_chart.ELSE[0].lower()}{decision_chart.ELSE[1:]}.</p>"
