"""The exercises, by name. Beside each lesson's judges stand plausible wrong answers (``*_wrong.py``), which the tests
prove to be rejected, each for its own reason."""

from dtlib.lab.checks.checks import Exercise
from dtlib.lab.lessons.l00 import judge_sum as start
from dtlib.lab.lessons.l02 import judge_pi as pi
from dtlib.lab.lessons.l03 import judge_hangs as hangs
from dtlib.lab.lessons.l03 import judge_ring as collectives
from dtlib.lab.lessons.l04 import judge_averaging as data_parallel
from dtlib.lab.lessons.l04 import judge_byte_golf as byte_golf
from dtlib.lab.lessons.l04 import observe_averaging as averaging
from dtlib.lab.lessons.l05 import judge_rates as large_batches
from dtlib.lab.lessons.l06 import judge_adam as zero
from dtlib.lab.lessons.l06 import judge_stage2 as zero2
from dtlib.lab.lessons.l06 import judge_stage3 as zero3
from dtlib.lab.lessons.l07 import judge_pipelines as pipelines
from dtlib.lab.lessons.l07 import judge_puzzle as puzzle
from dtlib.lab.lessons.l07 import observe_stages as staged
from dtlib.lab.lessons.l08 import judge_layers as tensor
from dtlib.lab.lessons.l08 import judge_replicator as replicator
from dtlib.lab.lessons.l08 import observe_layers as cut_layers

EXERCISES = {
    "first-sum": Exercise("total", start.observe_total, start.judge_total),
    "pi-streams": Exercise("count_my_points", pi.observe_count, pi.judge_count, any_size=True),
    "pi-on-ranks": Exercise("estimate_pi", pi.observe_estimate, pi.judge_estimate, any_size=True),
    "ring-mend": Exercise("ring_all_reduce", collectives.observe_ring, collectives.judge_ring, any_size=True),
    "ring-build": Exercise("my_all_reduce", collectives.observe_ring, collectives.judge_ring, any_size=True),
    "hook-mend": Exercise("average_with_hooks", averaging.observe_hooks, data_parallel.judge, any_size=True),
    "buckets-build": Exercise("MyDataParallel", averaging.observe_buckets, data_parallel.judge, any_size=True),
    "byte-golf": Exercise("golf", byte_golf.observe_golf, byte_golf.judge_golf),
    "warmup-mend": Exercise("warmup_settings", large_batches.observe_settings, large_batches.judge_settings),
    "scale-the-rate": Exercise("scaled_rate", large_batches.observe_scaled, large_batches.judge_scaled),
    "zero2-mend": Exercise("share_gradients", zero2.observe_shared, zero2.judge_shared),
    "sharded-adam": Exercise("ShardedAdam", zero.observe_adam, zero.judge_adam),
    "gather-on-demand": Exercise("OnDemand", zero3.observe_on_demand, zero3.judge_on_demand, any_size=True),
    "fit-it": Exercise("fit", zero3.observe_fit, zero3.judge_fit),
    "row-mend": Exercise("RowParallel", cut_layers.observe_row, tensor.judge_row),
    "mlp-build": Exercise("MyMLP", cut_layers.observe_mlp, tensor.judge_mlp, any_size=True),
    "step-build": Exercise("build_step", replicator.observe_step, replicator.judge_step),
    "hangs": Exercise("explained", hangs.observe_hangs, hangs.judge_hangs),
    "pipeline-mend": Exercise("train_step", staged.observe_batch, pipelines.judge_mend),
    "gpipe-build": Exercise("my_gpipe", staged.observe_microbatches, pipelines.judge_gpipe, any_size=True),
    "1f1b-build": Exercise("my_1f1b", staged.observe_microbatches, pipelines.judge_1f1b, any_size=True),
    "schedule-puzzle": puzzle.exercise(1),
    "schedule-puzzle-2": puzzle.exercise(2),
    "schedule-puzzle-3": puzzle.exercise(3),
    "schedule-puzzle-4": puzzle.exercise(4),
}
