"""``python -m tools.decision_chart``: lab.chart() as a picture and a page, for the book and the cheat sheet."""

from pathlib import Path

from dtlib.lab.decision_chart import BRANCHES, ELSE, LETTERS, chart

HERE = Path(__file__).parents[1] / "docs" / "reference"
PICTURE, PAGE = HERE / "decision_chart.svg", HERE / "decision_chart.md"


def main() -> None:
    drawn = chart.drawn()
    PICTURE.write_text(drawn.svg + "\n", encoding="utf-8")
    rows = ["| question | yes, if | then | measured in |", "| --- | --- | --- | --- |"]
    rows += ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in BRANCHES]
    PAGE.write_text(
        f"# Which parallelism when\n\n{LETTERS} In a notebook: `lab.chart()`; with your numbers: `lab.plan()`.\n\n"
        f"![{drawn.alt}](decision_chart.svg)\n\n" + "\n".join(rows) + "\n\n"
        f"If no row applies: {ELSE[0].lower()}{ELSE[1:]}.\n\n"
        "[How far off the planner is](../explanation/how_far_off_the_planner_is.md) has the errors of its figures.\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
