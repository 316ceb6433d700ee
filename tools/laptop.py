"""Meshes of four ranks, predicted before they are run.

    python -m tools.laptop predict    runs the meshes of CALIBRATION; writes tools/data/laptop_predicted.json: what each
                                     of MESHES will hold, send and take
    python -m tools.laptop measure    runs MESHES; writes docs/explanation/predicted_and_measured_steps.md
    python -m tools.laptop page       writes that page alone, from the last measurement

Ten of the meshes are lesson 14's, without its emulated link; the others are of other sizes. Seconds of a step are

    turn x passes + operation x operations + update x parameters + message x messages + byte x bytes + step

with six coefficients that are not negative, of least relative error on the meshes of CALIBRATION. Amounts are those of
the busiest core: passes of a micro-batch through the whole model, so a bubble costs nothing while other ranks have use
for the core; messages one after the other, as in dtlib/lessons/l14/brief.py. Memory and bytes have no clock in them.
"""

import json
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from dtlib.lessons.l14 import brief
from dtlib.planner import Model, Plan
from dtlib.planner.exact import of_decoder
from dtlib.world.launch import run_ranks
from dtlib.world.machine import usable_cores

ROOT, DATA = Path(__file__).parents[1], Path(__file__).parent / "data"
PREDICTED, MEASURED = DATA / "laptop_predicted.json", DATA / "laptop_measured.json"
PAGE = ROOT / "docs" / "explanation" / "predicted_and_measured_steps.md"
BAND, STEPS = 1.5, 7
UNITS = (
    (1e3, "ms per pass"), (1e12, "ps per operation"), (1e9, "ns per parameter"), (1e3, "ms per message"),
    (1e9, "ns per byte"), (1e3, "ms per step"),
)  # fmt: skip
MODELS = {width: Model(4, width, 4, 256, 64, tied=False) for width in (64, 128, 256)}
NEW = {
    "data 4, 32 samples": (128, Plan(data=4, batch=32, micro_batch=8)),
    "data 4, ZeRO-2, 4 micro-batches": (128, Plan(data=4, zero=2, batch=16, micro_batch=1)),
    "data 2, tensor 2, 4 micro-batches": (128, Plan(data=2, tensor=2, batch=16, micro_batch=2)),
    "data 2, pipe 2, GPipe, 32 samples": (128, Plan(data=2, pipe=2, batch=32, micro_batch=4, schedule="gpipe")),
    "pipe 4, 8 micro-batches": (128, Plan(pipe=4, batch=16, micro_batch=2)),
    "tensor 4, 4 micro-batches": (128, Plan(tensor=4, batch=16, micro_batch=4)),
    "width 256: data 4, ZeRO-1": (256, Plan(data=4, zero=1, batch=16, micro_batch=4)),
    "width 256: data 4, ZeRO-3": (256, Plan(data=4, zero=3, batch=16, micro_batch=4)),
    "width 256: pipe 4": (256, Plan(pipe=4, batch=16, micro_batch=4)),
    "width 256: pipe 2, tensor 2": (256, Plan(pipe=2, tensor=2, batch=16, micro_batch=4)),
}
MESHES = {name: (128, plan) for name, plan in brief.MESHES.items()} | NEW
CALIBRATION = {
    f"{number}": mesh
    for number, mesh in enumerate((
        (128, Plan(data=4, batch=12, micro_batch=3)), (128, Plan(data=4, zero=1, batch=24, micro_batch=6)),
        (128, Plan(data=4, zero=2, batch=24, micro_batch=3)), (128, Plan(data=4, zero=3, batch=12, micro_batch=3)),
        (128, Plan(data=4, zero=3, batch=24, micro_batch=3)), (128, Plan(data=2, tensor=2, batch=12, micro_batch=3)),
        (128, Plan(tensor=4, batch=12, micro_batch=6)), (128, Plan(data=2, pipe=2, zero=1, batch=12, micro_batch=2)),
        (128, Plan(pipe=4, batch=12, micro_batch=3)), (128, Plan(pipe=4, batch=12, micro_batch=2)),
        (128, Plan(pipe=2, tensor=2, batch=12, micro_batch=3)), (64, Plan(data=4, batch=12, micro_batch=3)),
        (64, Plan(data=4, zero=3, batch=12, micro_batch=3)), (64, Plan(pipe=4, batch=12, micro_batch=3)),
    ))
}  # fmt: skip


def amounts(model: Model, plan: Plan, cores: int) -> list[float]:
    """Passes, operations, parameters, messages, bytes and 1, of a step of the busiest core."""
    m, travels, count = plan.micro_batches, brief.sent(plan, model), brief.messages(plan, model)
    turns = m + plan.pipe - 1
    passes = max(turns, plan.gpus * m / cores) / plan.pipe
    operations = passes * plan.micro_batch * model.operations(model.seq) / plan.tensor
    states = max(of_decoder(model, plan, rank)["held"]["optimizer_states"] for rank in range(plan.gpus)) / 8
    messages = count["data"] + turns * (count["tensor"] + count["pipe"])
    sent = travels["data"] + turns / m * (travels["tensor"] + travels["pipe"])
    return [passes, operations, states * max(1.0, plan.gpus / cores), messages, sent, 1.0]


def fitted(found: dict, cores: int) -> tuple[list[float], float]:
    """Coefficients, and the mean error of each mesh of CALIBRATION, predicted from the others."""
    import numpy as np
    from scipy.optimize import nnls

    rows = [amounts(MODELS[width], plan, cores) for width, plan in CALIBRATION.values()]
    shares = np.array(rows) / np.array([found[name]["seconds"] for name in CALIBRATION])[:, None]
    everything, off = range(len(rows)), []
    for out in everything:
        rest = [row for row in everything if row != out]
        off.append(abs(float(shares[out] @ nnls(shares[rest], np.ones(len(rest)))[0]) - 1))
    return nnls(shares, np.ones(len(rows)))[0].tolist(), sum(off) / len(off)


def on_this_rank(meshes: dict, path: str) -> None:
    import dtlib

    comm, found = dtlib.init().comm, {}
    for name, (width, plan) in meshes.items():
        with redirect_stderr(StringIO()):  # progress bars
            mine = brief.measured(plan, STEPS, limit=False, link=False, model=MODELS[width])
        found[name] = {**mine, "sent": comm.all_gather_object(mine["sent"])}
    if comm.rank == 0:
        Path(path).write_text(json.dumps(found))


def on_ranks(what: str):
    path = PREDICTED.with_suffix(".tmp")
    try:
        if status := run_ranks(["-m", "tools.laptop", f"_{what}", str(path)], brief.RANKS):
            raise SystemExit(status)
        return json.loads(path.read_text())
    finally:
        path.unlink(missing_ok=True)


def predictions(found: dict) -> dict:
    cores, meshes = usable_cores(), {}
    coefficients, error = fitted(found, cores)
    for name, (width, plan) in MESHES.items():
        ranks = [of_decoder(MODELS[width], plan, rank) for rank in range(plan.gpus)]
        took = amounts(MODELS[width], plan, cores)
        meshes[name] = {
            "held": [sum(rank["held"].values()) for rank in ranks],
            "sent": [sum(rank["sent"].values()) for rank in ranks],
            "seconds": sum(a * b for a, b in zip(coefficients, took, strict=True)),
        }
    measured = {name: each["seconds"] for name, each in found.items()}
    calibration = {"cores": cores, "coefficients": coefficients, "error": error, "seconds": measured}
    return {"calibration": calibration, "band": BAND, "meshes": meshes}


def page(said: dict, found: dict) -> str:
    rows, exact, ratios = [], 0, {}
    for name, mesh in said["meshes"].items():
        got = found[name]
        equal = mesh["held"] == got["held"], mesh["sent"] == got["sent"]
        ratios[name] = got["seconds"] / mesh["seconds"]
        exact += all(equal)
        rows.append(
            f"| {name} | {max(mesh['held']):,} | {'equal' if equal[0] else max(got['held'])} | {max(mesh['sent']):,} "
            f"| {'equal' if equal[1] else max(got['sent'])} | {1000 * mesh['seconds']:.0f} "
            f"| {1000 * got['seconds']:.0f} | {ratios[name]:.2f} |"
        )
    headers = (
        "| mesh | bytes held | found | bytes sent | found | ms, predicted | measured | ratio |\n| ---" + " | ---:" * 7
    )
    known, old = said["calibration"], [ratios[name] for name in brief.MESHES]
    new = [ratio for name, ratio in ratios.items() if name not in brief.MESHES]

    def inside(some) -> str:
        return f"{sum(1 / said['band'] <= ratio <= said['band'] for ratio in some)} of {len(some)}"

    def error(some) -> str:
        return f"{100 * sum(abs(1 / ratio - 1) for ratio in some) / len(some):.0f} %"

    text = (DATA / "laptop_text.md").read_text(encoding="utf-8")
    return text.format(
        table=headers + " |\n" + "\n".join(rows), exact=exact, count=len(rows), band=said["band"],
        inside_old=inside(old), inside_new=inside(new), error_old=error(old), error_new=error(new),
        cores=known["cores"], meshes=len(CALIBRATION), held_out=f"{100 * known['error']:.0f} %",
        coefficients=", ".join(
            f"{scale * value:.3g} {unit}"
            for value, (scale, unit) in zip(known["coefficients"], UNITS, strict=True)
        ),
    )  # fmt: skip


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what.startswith("_"):
        on_this_rank({"_calibrate": CALIBRATION, "_measure": MESHES}[what], sys.argv[2])
    elif what == "predict":
        PREDICTED.write_text(json.dumps(predictions(on_ranks("calibrate")), indent=1) + "\n")
    elif what in ("measure", "page"):
        if what == "measure":
            MEASURED.write_text(json.dumps(on_ranks("measure")) + "\n")
        said, found = json.loads(PREDICTED.read_text()), json.loads(MEASURED.read_text())
        PAGE.write_text(page(said, found), encoding="utf-8")
    else:
        raise SystemExit("python -m tools.laptop predict, or measure, or page")


if __name__ == "__main__":
    main()
