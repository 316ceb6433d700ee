"""Memory to the byte: what a rank holds at each stage of ZeRO, and how many ranks it takes to fit."""

from dtlib.browser.fields import Choice, Number
from dtlib.browser.svg import WIDTH, Picture, letters_on
from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.tables import Table
from dtlib.theory.zero import GB, SCHEMES, STAGES, fewest_ranks, zero_bytes, zero_wire_elements

TITLE, LESSON = "Memory to the byte", "06_zero"
SAYS = (
    "What one rank holds of a model's states, by ZeRO's stages: parameters, gradients, master weights and the "
    "optimizer's states. No activations. Which stage fits below the line first?"
)
FORM = (
    Number("memory", "parameters, in billions", 7.5, 0.000001, 10_000, 0.1),
    Number("ranks", "ranks", 64, 1, 1_000_000),
    Choice("scheme", "bytes a parameter", "mixed_adam", {
        name: f"{each.parameters} + {each.gradients} + {each.optimizer}: {name.replace('_', ' ')}"
        for name, each in SCHEMES.items()
    }),
    Number("room", "memory of a rank, in GB", 80, 0.001, 10_000, 0.1),
)  # fmt: skip
KINDS = ("parameters", "gradients", "master_weights", "optimizer_states", "padding")
ROW, LEFT = 42, 84


def table(parameters: int, ranks: int, scheme: str) -> list[dict]:
    """Of each stage: bytes that rank 0 holds, by kind."""
    return [zero_bytes(parameters, ranks, stage, scheme) for stage in STAGES]


def show(memory: float, ranks: int, scheme: str, room: float) -> str:
    parameters = round(memory * 1e9)
    held = table(parameters, ranks, scheme)
    totals = [sum(each.values()) for each in held]
    need = [fewest_ranks(parameters, room * GB, stage, scheme) for stage in STAGES]
    fit = [str(stage) for stage in STAGES if totals[stage] <= room * GB]
    said = f"Stage {' and '.join(fit[:1])} is the first that fits" if fit else "No stage fits"
    alt = (
        f"What a rank holds of {memory:g} billion parameters on {ranks} ranks: "
        + ", ".join(f"stage {stage} {totals[stage] / GB:.2f} GB" for stage in STAGES)
        + f". {said} into {room:g} GB."
    )
    picture = Picture(ROW * 4 + 48, alt)
    scale = (WIDTH - LEFT - 110) / max(*totals, room * GB)
    for stage, each in enumerate(held):
        x, y = float(LEFT), stage * ROW + 4
        picture.words(0, y + 22, f"stage {stage}")
        for kind, colour in zip(KINDS, RANK_COLOURS, strict=False):
            width = each[kind] * scale
            if width:
                picture.box(x, y, width, ROW - 10, colour, title=f"{kind.replace('_', ' ')}: {each[kind]:,} bytes")
            words = kind.replace("_", " ")
            if width > 9 * len(words):
                picture.words(x + width / 2, y + 21, words, "middle", letters_on(colour))
            x += width
        picture.words(x + 6, y + 21, f"{totals[stage] / GB:.2f} GB")
    line = LEFT + room * GB * scale
    picture.line(line, 0, line, ROW * 4, "#D55E00", 3, dashed=True)
    picture.words(min(line, WIDTH - 90), ROW * 4 + 16, f"{room:g} GB", "middle")
    for at, kind in enumerate(KINDS[:4]):
        picture.box(LEFT + at * 200, ROW * 4 + 26, 12, 12, RANK_COLOURS[at])
        picture.words(LEFT + at * 200 + 18, ROW * 4 + 37, kind.replace("_", " "))
    rows = [
        (stage, *(each[kind] for kind in KINDS), totals[stage], need[stage] or "none",
         zero_wire_elements(parameters, ranks, stage) * SCHEMES[scheme].parameters)
        for stage, each in enumerate(held)
    ]  # fmt: skip
    headers = ("stage", *(kind.replace("_", " ") for kind in KINDS), "in all", "ranks to fit", "sent")
    return (
        picture.html()
        + Table(rows, headers, "Bytes that rank 0 holds, and sends a step", align="r" * len(headers))._repr_html_()
    )
