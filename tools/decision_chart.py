"""``python -m tools.decision_chart``: lab.chart() as a picture and a page, for the book and the cheat sheet."""

from pathlib import Path

from dtlib.lab.decision_chart import BRANCHES, ELSE, LEGEND, chart

HERE = Path(__file__).parents[1] / "docs" / "reference"
PICTURE, PAGE = HERE / "decision_chart.svg", HERE / "decision_chart.md"


def main() -> None:
    drawn = chart.drawn()
    PICTURE.write_text(drawn.svg + "\n", encoding="utf-8")
    rows = ["| question | yes, if | then | measured in |", "| --- | --- | --- | --- |"]
    rows += ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in BRANCHES]
    PAGE.write_text(
        "# Which parallelism when\n\nAnswer the questions from top to bottom. Go to the next question if the answer is "
        "no, or if the method is not enough. In a notebook, `lab.chart()` draws this chart, and `lab.plan()` computes "
        f"it with your numbers.\n\n{LEGEND}\n\n"
        f"![{drawn.alt}](decision_chart.svg)\n\n" + "\n".join(rows) + "\n\n"
        f"If no row applies: {ELSE[0].lower()}{ELSE[1:]}.\n\n"
        "[How far off the planner is](../explanation/how_far_off_the_planner_is.md) lists the errors of the planner.\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
