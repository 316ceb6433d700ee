"""The exercises, by name. Beside each lesson's judges stand plausible wrong answers (``*_wrong.py``), which the tests
prove to be rejected, each for its own reason."""

from dtlib.lab.checks import Exercise
from dtlib.lab.exercises import (
    collectives,
    data_parallel,
    hangs,
    large_batches,
    pi,
    pipelines,
    puzzle,
    replicator,
    staged,
    start,
    tensor,
    zero,
    zero2,
    zero3,
)

EXERCISES = {
    "first-sum": Exercise("total", start.observe_total, start.judge_total),
    "pi-streams": Exercise("count_my_points", pi.observe_count, pi.judge_count),
    "pi-on-ranks": Exercise("estimate_pi", pi.observe_estimate, pi.judge_estimate),
    "ring-mend": Exercise("ring_all_reduce", collectives.observe_ring, collectives.judge_ring),
    "ring-build": Exercise("my_all_reduce", collectives.observe_ring, collectives.judge_ring),
    "hook-mend": Exercise("average_with_hooks", data_parallel.observe_hooks, data_parallel.judge),
    "buckets-build": Exercise("MyDataParallel", data_parallel.observe_buckets, data_parallel.judge),
    "byte-golf": Exercise("golf", data_parallel.observe_golf, data_parallel.judge_golf),
    "warmup-mend": Exercise("warmup_settings", large_batches.observe_settings, large_batches.judge_settings),
    "scale-the-rate": Exercise("scaled_rate", large_batches.observe_scaled, large_batches.judge_scaled),
    "zero2-mend": Exercise("share_gradients", zero2.observe_shared, zero2.judge_shared),
    "sharded-adam": Exercise("ShardedAdam", zero.observe_adam, zero.judge_adam),
    "gather-on-demand": Exercise("OnDemand", zero3.observe_on_demand, zero3.judge_on_demand),
    "fit-it": Exercise("fit", zero3.observe_fit, zero3.judge_fit),
    "row-mend": Exercise("RowParallel", tensor.observe_row, tensor.judge_row),
    "mlp-build": Exercise("MyMLP", tensor.observe_mlp, tensor.judge_mlp),
    "step-build": Exercise("build_step", replicator.observe_step, replicator.judge_step),
    "hangs": Exercise("explained", hangs.observe_hangs, hangs.judge_hangs),
    "pipeline-mend": Exercise("train_step", staged.observe_batch, pipelines.judge_mend),
    "gpipe-build": Exercise("my_gpipe", staged.observe_microbatches, pipelines.judge_gpipe),
    "1f1b-build": Exercise("my_1f1b", staged.observe_microbatches, pipelines.judge_1f1b),
    "schedule-puzzle": puzzle.exercise(1),
    "schedule-puzzle-2": puzzle.exercise(2),
    "schedule-puzzle-3": puzzle.exercise(3),
    "schedule-puzzle-4": puzzle.exercise(4),
}
