"""What llm-analysis says of vTrain's rows on many nodes: ``python -m tools.planner_peers`` writes
data/llm_analysis_vtrain.csv.

Needs ``pip install 'dtlib[planner]'``. Its efficiency of operations is set by hand: 0.5, the middle of what its own
examples use, and 0.43, the one that suits these rows best (chosen on them). The rest is as it comes."""

import contextlib
import csv
import io
import logging
from importlib.metadata import version

from tools.planner_fit import DATA, vtrain

EFFICIENCIES = (0.43, 0.5)
FILE = DATA / "llm_analysis_vtrain.csv"


def seconds_of(row, efficiency: float) -> float:
    """Of a step."""
    from llm_analysis import analysis, config

    plan, model = row.plan, row.model
    made = config.ModelConfig("row", model.layers, model.heads, model.hidden, model.vocab, model.seq, expansion_ratio=4)
    axes = config.ParallelismConfig(tp_size=plan.tensor, pp_size=plan.pipe, dp_size=plan.data)
    gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
    peer = analysis.LLMAnalysis(
        made, gpu, parallelism_config=axes, flops_efficiency=efficiency, hbm_memory_efficiency=0.8
    )
    with contextlib.redirect_stdout(io.StringIO()):
        says = peer.training(
            batch_size_per_gpu=plan.micro_batch, gradient_accumulation_steps=plan.micro_batches, seq_len=model.seq,
            activation_recomputation=analysis.ActivationRecomputation.FULL, flash_attn=False,
        )  # fmt: skip
    return says["latency_per_iter"]


def main() -> None:
    logging.disable(logging.CRITICAL)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["hidden", "plan", "measured_s", *(f"efficiency_{each}_s" for each in EFFICIENCIES), "source"])
        source = f"llm-analysis {version('llm-analysis')}, by tools/planner_peers.py"
        for row in vtrain("multi"):
            says = [f"{seconds_of(row, each):.3f}" for each in EFFICIENCIES]
            writer.writerow([row.model.hidden, str(row.plan), row.seconds, *says, source])
            source = "the same"


if __name__ == "__main__":
    main()
