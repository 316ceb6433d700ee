"""Ten meshes of four ranks, predicted before they are run.

    python -m docs.laptop predict    four numbers are measured here, and docs/laptop.json says what each mesh will hold,
                                     send and take
    python -m docs.laptop measure    they are run, and docs/laptop.md has both side by side

The model and the meshes are lesson 14's, without its emulated link. A step is predicted to take

    compute    max(turns x micro-batch x s / (pipe x tensor), batch x s / cores)    s: a sample's passes on its own core
    update     u x parameters whose states a rank has x max(1, ranks / cores)       u: AdamW, a parameter
    messages   latency and bytes / bandwidth, one after the other, as in dtlib/lessons/l14/brief.py

so a bubble costs nothing while other ranks have use for the core. Memory and bytes have no clock in them.
"""

import json
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from dtlib.lessons.l14 import brief
from dtlib.planner.exact import of_decoder
from dtlib.world.launch import run_ranks
from dtlib.world.machine import usable_cores

PREDICTED, PAGE = Path(__file__).with_name("laptop.json"), Path(__file__).with_name("laptop.md")
BAND = 1.5
STEPS = 12


def median(seconds) -> float:
    return sorted(seconds)[len(seconds) // 2]


def calibrate() -> dict:
    """On four ranks at once: seconds of a sample and of a parameter's update, of a short message, bytes a second."""
    import torch

    import dtlib
    from dtlib.workloads import decoder

    comm = dtlib.init().comm
    crowd = max(1.0, comm.size / usable_cores())
    work = decoder.workload({"layers": brief.MODEL.layers})
    x, y = torch.utils.data.default_collate([work.train[place] for place in range(4)])
    optimizer = torch.optim.AdamW(work.model.parameters())

    def timed(what, times) -> float:
        took = []
        for _ in range(times):
            comm.barrier()
            began = time.perf_counter()
            what()
            comm.barrier()
            took.append(time.perf_counter() - began)
        return median(took)

    def exchange(count):
        buffer, other = torch.zeros(count), comm.rank ^ 1
        if comm.rank < 2:
            for turn in range(20):
                if turn % 2 == comm.rank:
                    comm.send(buffer, other)
                else:
                    comm.recv(buffer, other)

    sample = timed(lambda: work.loss_fn(work.model(x), y).backward(), 12) / len(x)
    update = timed(optimizer.step, 12) / brief.MODEL.parameters
    short, long = (timed(lambda count=count: exchange(count), 9) / 20 for count in (2, 2**18))
    return {
        "cores": usable_cores(), "sample": sample / crowd, "update": update / crowd,
        "latency": short, "bandwidth": 4 * (2**18 - 2) / max(long - short, 1e-9),
    }  # fmt: skip


def seconds(plan, found: dict) -> float:
    m, cores = plan.micro_batches, found["cores"]
    turns, travels, count = m + plan.pipe - 1, brief.sent(plan), brief.messages(plan)
    own = turns * plan.micro_batch * found["sample"] / (plan.pipe * plan.tensor)
    together = plan.batch * found["sample"] / cores
    states = max(of_decoder(brief.MODEL, plan, rank)["held"]["optimizer_states"] for rank in range(plan.gpus)) / 8
    update = states * found["update"] * max(1.0, plan.gpus / cores)
    messages = count["data"] + turns * (count["tensor"] + count["pipe"])
    sent = travels["data"] + turns / m * (travels["tensor"] + travels["pipe"])
    return max(own, together) + update + messages * found["latency"] + sent / found["bandwidth"]


def on_this_rank(what: str, path: str) -> None:
    import dtlib

    comm = dtlib.init().comm
    if what == "calibrate":
        found = calibrate()
    else:
        found = {}
        for name, plan in brief.MESHES.items():
            with redirect_stderr(StringIO()):  # progress bars
                mine = brief.measured(plan, STEPS, limit=False, link=False)
            found[name] = {**mine, "sent": comm.all_gather_object(mine["sent"])}
    if comm.rank == 0:
        Path(path).write_text(json.dumps(found))


def on_ranks(what: str):
    path = PREDICTED.with_suffix(".tmp")
    try:
        if status := run_ranks(["-m", "docs.laptop", f"_{what}", str(path)], brief.RANKS):
            raise SystemExit(status)
        return json.loads(path.read_text())
    finally:
        path.unlink(missing_ok=True)


def predictions(found: dict) -> dict:
    meshes = {}
    for name, plan in brief.MESHES.items():
        ranks = [of_decoder(brief.MODEL, plan, rank) for rank in range(plan.gpus)]
        meshes[name] = {
            "held": [sum(rank["held"].values()) for rank in ranks],
            "sent": [sum(rank["sent"].values()) for rank in ranks],
            "seconds": seconds(plan, found),
        }
    return {"calibration": found, "band": BAND, "meshes": meshes}


def page(said: dict, found: dict) -> str:
    rows, inside, ratios, exact = [], 0, [], 0
    for name, mesh in said["meshes"].items():
        came = found[name]
        equal = mesh["held"] == came["held"], mesh["sent"] == came["sent"]
        ratio = came["seconds"] / mesh["seconds"]
        inside += 1 / said["band"] <= ratio <= said["band"]
        exact += all(equal)
        ratios.append(ratio)
        rows.append(
            f"| {name} | {max(mesh['held']):,} | {'equal' if equal[0] else max(came['held'])} | {max(mesh['sent']):,} "
            f"| {'equal' if equal[1] else max(came['sent'])} | {1000 * mesh['seconds']:.0f} "
            f"| {1000 * came['seconds']:.0f} | {ratio:.2f} |"
        )
    known = said["calibration"]
    error = sum(abs(1 / ratio - 1) for ratio in ratios) / len(ratios)
    text = Path(__file__).with_name("laptop_text.md").read_text(encoding="utf-8")
    table = (
        "| mesh | bytes held | found | bytes sent | found | ms, predicted | measured | ratio |\n| --- " + "| ---: " * 7
    )
    return text.format(
        table=table + "|\n" + "\n".join(rows), cores=known["cores"], sample=1000 * known["sample"],
        update=1e9 * known["update"], latency=1e6 * known["latency"], bandwidth=known["bandwidth"] / 1e9,
        band=said["band"], inside=inside, count=len(rows), error=f"{100 * error:.0f} %", exact=exact,
    )  # fmt: skip


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what.startswith("_"):
        on_this_rank(what[1:], sys.argv[2])
    elif what == "predict":
        PREDICTED.write_text(json.dumps(predictions(on_ranks("calibrate")), indent=1) + "\n")
    elif what == "measure":
        PAGE.write_text(page(json.loads(PREDICTED.read_text()), on_ranks("measure")), encoding="utf-8")
    else:
        raise SystemExit("python -m docs.laptop predict, or measure")


if __name__ == "__main__":
    main()
