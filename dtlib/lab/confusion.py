"""Which classes a model takes for which: the confusion matrix as a picture."""

from dtlib.lab.drawing import POINTS, shown, subplots
from dtlib.lab.tables import Table


@shown
def confusion(table, classes):
    """The matrix of ``vision.confusion``: a row for what an image shows, a column for what it was taken for.

    Colours are fractions of a row, numbers are images; a zero is left out.

    Args:
        table: (classes, classes), whole numbers.
        classes: their names.
    """
    rows = [[int(count) for count in row] for row in table]
    fractions = [[count / max(1, sum(row)) for count in row] for row in rows]
    size = 0.5 * len(rows)
    figure, axes = subplots(height=size + 1, width=size + 2)
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    for i, row in enumerate(rows):
        for j, count in enumerate(row):
            if count:
                dark = fractions[i][j] > 0.5
                axes.text(j, i, count, ha="center", va="center", fontsize=POINTS, color="white" if dark else "black")
    turned = {"rotation": 90} if max(map(len, classes)) > 2 else {}
    axes.set_xticks(range(len(rows)), classes, **turned)
    axes.set_yticks(range(len(rows)), classes)
    axes.set(xlabel="taken for", ylabel="shows")
    images, right = sum(map(sum, rows)), sum(rows[i][i] for i in range(len(rows)))
    wrong = sorted(((rows[i][j], i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j), reverse=True)
    found = [(classes[i], classes[j], count) for count, i, j in wrong[:10] if count]
    alt = f"Confusion matrix: {right} of {images} images in their class, {right / max(1, images):.1%}."
    return figure, alt, Table(found or [("none", "", 0)], ("shows", "taken for", "images"))
