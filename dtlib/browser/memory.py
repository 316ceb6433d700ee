"""The room that counts memory: bytes on a rank at each stage of ZeRO, and the number of ranks needed to fit."""

from dtlib.browser.fields import Choice, Number
from dtlib.browser.svg import WIDTH, Picture, letters_on
from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.tables import Table
from dtlib.planner import MODELS, Plan, check
from dtlib.planner.memory import parameters_of_stage
from dtlib.theory.zero import GB, SCHEMES, STAGES, fewest_ranks, zero_bytes, zero_wire_elements

TITLE, LESSON = "Memory to the byte", "06_zero"
SAYS = (
    "What one rank holds of a model's states on a mesh, by ZeRO's stages: parameters, gradients, master weights and "
    "the optimizer's states, to the byte. No activations. Which stage fits below the line first?"
)
FORM = (
    Choice("model", "model", "", {"": "of so many parameters", **{name: name for name in MODELS}}),
    Number("memory", "parameters, in billions", 7.5, 0.000001, 10_000, 0.1),
    Number("ranks", "data axis", 64, 1, 1_000_000),
    Number("tensor", "tensor axis", 1, 1, 1024),
    Number("pipe", "pipe axis", 1, 1, 1024),
    Choice("scheme", "bytes a parameter", "mixed_adam", {
        name: f"{each.parameters} + {each.gradients} + {each.optimizer}: {name.replace('_', ' ')}"
        for name, each in SCHEMES.items()
    }),
    Number("room", "memory of a rank, in GB", 80, 0.001, 10_000, 0.1),
)  # fmt: skip
KINDS = ("parameters", "gradients", "master_weights", "optimizer_states", "padding")
ROW, LEFT = 42, 84


def table(parameters: int, ranks: int, scheme: str) -> list[dict]:
    """Return the bytes on rank 0 by kind, for each ZeRO stage."""
    return [zero_bytes(parameters, ranks, stage, scheme) for stage in STAGES]


def on_first_rank(model: str, parameters: int, ranks: int, tensor: int, pipe: int) -> int:
    """Return the parameters on a rank of the first pipeline stage, before ZeRO shards them.

    Without a model, parameters are divided evenly over the tensor and pipe axes.
    """
    if not model:
        return -(-parameters // (tensor * pipe))
    plan = check(MODELS[model], Plan(data=ranks, tensor=tensor, pipe=pipe, batch=ranks, micro_batch=1))
    return sum(parameters_of_stage(MODELS[model], plan, 0))


def show(model: str, memory: float, ranks: int, tensor: int, pipe: int, scheme: str, room: float) -> str:
    """Return a picture and a table of the bytes at each stage, as HTML."""
    parameters = on_first_rank(model, round(memory * 1e9), ranks, tensor, pipe)
    held = table(parameters, ranks, scheme)
    totals = [sum(each.values()) for each in held]
    need = [fewest_ranks(parameters, room * GB, stage, scheme) for stage in STAGES]
    fit = [str(stage) for stage in STAGES if totals[stage] <= room * GB]
    said = f"Stage {' and '.join(fit[:1])} is the first that fits" if fit else "No stage fits"
    alt = (
        f"What a rank holds of its {parameters / 1e9:.4g} billion parameters, with a data axis of {ranks}: "
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
    headers = ("stage", *(kind.replace("_", " ") for kind in KINDS), "in all", "data axis to fit", "sent")
    return (
        picture.html()
        + Table(rows, headers, "Bytes that rank 0 holds, and sends a step", align="r" * len(headers))._repr_html_()
    )
