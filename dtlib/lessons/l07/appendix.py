# %% [markdown]
# # 07b Pipelines in earnest
#
# Forty minutes, optional: an appendix to lesson 07. There all stages were equal and messages took no time. Here you see
# real cases: parallel branches, sends that wait, slow layers, slow messages. Then you test the simulation with
# a published table.
#
# **Questions.** What can run at the same time without micro-batches? Where do you cut a real model? When are the
# formulas of lesson 07 wrong, and what can you use then?
#
# **Afterwards you can** place branches on ranks; choose cuts by time; simulate a schedule with your own times for
# stages and messages; name other pipeline systems, and say how they differ.
#
# **You need** [07 Pipelines](07_pipelines.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# A cell that starts with `%%px --local` runs on the ranks and in the notebook.

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dtlib import lab
from dtlib.lab import digits, explorer
from dtlib.parallel.pipeline import LayerSpec, PipelineModule
from dtlib.schedule import ScheduleError, formulas, gpipe, one_f_one_b, simulate, validate

# %% [markdown]
# ## Two branches
#
# A net has two branches that do not need each other: one reads the upper half of an image, the other the lower half,
# and a head joins them. Independent branches can run at the same time. Here each branch runs on one rank, and rank 0
# also has the head. (Ranks 0 and 1 are a pair; ranks 2 and 3 do the same.) Time is **EMULATED**: a stage computes, then
# sleeps, like a core that waits for its accelerator.

# %%
# %%px
world = dtlib.init()
comm = world.comm
pair = comm.split(world.rank // 2)  # a communicator for two ranks
(x, y), test = digits.load(torch.float64)


def block_of(seed, *sizes, seconds=0.05):
    """A linear layer and tanh. EMULATED: forward takes this time, and backward twice as long."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(*sizes), nn.Tanh()).double()
    return explorer.EmulatedStage(layers, seconds, 2 * seconds)

# %% [markdown]
# autograd cannot follow a tensor across a message, so you send gradients by hand. In `backward`, rank 0 computes the
# head's backward pass, and sends rank 1 the gradient of rank 1's output. Then both ranks compute the backward passes of
# their branches at the same time.

# %%
# %%px
class Branches(nn.Module):
    """A branch on each of two ranks; rank 0 joins them."""

    def __init__(self):
        super().__init__()
        self.branch = block_of(pair.rank, 32, 48)
        self.head = block_of(7, 96, 10) if pair.rank == 0 else None

    def forward(self, images):
        with dtlib.phase("branch"):
            self.mine = self.branch(images[:, 32 * pair.rank :][:, :32])
        if pair.rank == 1:
            return pair.send(self.mine.detach(), 0)
        self.inputs = [self.mine.detach(), pair.recv(torch.empty_like(self.mine), 1)]
        with dtlib.phase("head"):
            return self.head(torch.cat([one.requires_grad_() for one in self.inputs], dim=1))

    def backward(self, loss=None):
        if pair.rank == 0:
            with dtlib.phase("backward"):
                loss.backward()  # the head alone: its inputs are leaves
            gradient = self.inputs[0].grad
            pair.send(self.inputs[1].grad, 1)
        else:
            gradient = pair.recv(torch.empty_like(self.mine), 0)
        with dtlib.phase("backward"):
            self.mine.backward(gradient)

# %% [markdown]
# **Predict.** A block takes 50 ms forward and 100 ms backward: in one process the three blocks take 450 ms. How many
# milliseconds does a step take on two ranks?

# %% tags=["stub"]
lab.predict("milliseconds-of-branches", None)

# %% tags=["solution"]
lab.predict("milliseconds-of-branches", 300)

# %% [markdown]
# The next cell runs a step on ranks, then the same in one process, for comparison:

# %%
# %%px
net = Branches()
for _ in range(2):  # the first step of a process takes longer
    net.zero_grad()
    pair.barrier()
    with dtlib.trace() as trace:
        scores = net(x[:96])
        net.backward(cross_entropy(scores, y[:96]) if pair.rank == 0 else None)

# %%
# %%px
upper, lower, head = block_of(0, 32, 48), block_of(1, 32, 48), block_of(7, 96, 10)  # in one process
joined = torch.cat([upper(x[:96, :32]), lower(x[:96, 32:])], dim=1)
cross_entropy(head(joined), y[:96]).backward()
branch = (upper, lower)[pair.rank]
both = zip(net.branch.parameters(), branch.parameters(), strict=True)
apart = max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in both)
print(f"gradients of branch {pair.rank} differ from those of one process by {apart:.0e}")

# %% tags=["nbval-ignore-output"]
timeline = dtlib.Timeline(lab.values("trace")[:2])
lab.pictures.timeline(timeline)

# %% tags=["claim"]
# "only while the head is computed does rank 1 wait"
# "The gradients equal those of one process, to 1e-12."
ends = [event.end for event in timeline.events if event.name == "branch"]
begin = next(event.start for event in timeline.events if event.name == "head")
assert len(ends) == 2 and max(ends) <= begin
assert max(lab.values("apart")) < 1e-12

# %% [markdown]
# About 300 ms: both ranks compute in their branches, forward and backward, and only while the head is computed does rank 1
# wait. The gradients equal those of one process, to 1e-12.
#
# ## Sends that wait
#
# If a *send* waits for its receiver, a correct order can hang: rank 0 sends activations down while rank 1 sends
# gradients up, and neither receives. dtlib posts its receives before they are needed, and does not wait in a send. With
# `lookahead=0` no receive is posted ahead, and the check of 1F1B finds the circle:

# %%
try:
    validate(one_f_one_b(2, 4), lookahead=0)
except ScheduleError as problem:
    print(lab.fold(problem))

# %% [markdown]
# ## Where to cut
#
# A pipeline is only as fast as its slowest stage. Equally many layers (`"uniform"`) are rarely equal work. The number
# of parameters often says more, but only time is certain: `partition_method="time"` runs each layer with a sample. In
# this list two layers are slow (EMULATED) and have few parameters, as convolutions do.

# %% tags=["nbval-ignore-output"]
# %%px
slow = {"forward": 0.05, "backward": 0.1}  # seconds
specs = [LayerSpec(explorer.EmulatedStage, nn.Linear(8, 8), **slow) for _ in range(2)]
specs += [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
specs += [LayerSpec(nn.Linear, 8, 512), LayerSpec(nn.Linear, 512, 8)]
rows = []
for way in ("uniform", "parameters", "time"):
    _, cut, end = PipelineModule(specs, 2, partition_method=way, sample=torch.ones(4, 8)).cuts
    slow_ones = f"{min(cut, 2)} and {2 - min(cut, 2)}"
    rows.append((way, f"0 to {cut - 1}", f"{cut} to {end - 1}", slow_ones))
if world.rank == 0:
    lab.table(rows, ("partition_method", "layers in stage 0", "in stage 1", "slow layers in each"))

# %% tags=["statement"]
# "only time is certain"
# "In this list two layers are slow (EMULATED) and have few parameters"
assert [row(way)[-2:] for way in ("uniform", "parameters", "time")] == [[2, 0], [2, 0], [1, 1]]

# %% [markdown]
# **Predict.** GPipe, four stages and eight micro-batches: with equal stages the makespan is 33 forward passes. Now stage 1
# takes twice as long, forward and backward. How long is the makespan?

# %% tags=["stub"]
lab.predict("makespan-with-a-slow-stage", None)

# %% tags=["solution"]
lab.predict("makespan-with-a-slow-stage", 57)

# %%
forward = {0: 1, 1: 2, 2: 1, 3: 1}  # the time of each stage
backward = {stage: 2 * time for stage, time in forward.items()}
uneven = simulate(gpipe(4, 8), forward, backward).makespan
print(f"makespan: equal stages {simulate(gpipe(4, 8)).makespan:g}, one twice as slow {uneven:g}")

# %% tags=["statement"]
# "with equal stages the makespan is 33 forward passes"
# "a quarter more work, and nearly three quarters more time"
# "with one of four stages twice as slow, GPipe's makespan is 57 instead of 33"
equal, slow = found(r"equal stages (\d+), one twice as slow (\d+)")
assert (equal, slow) == (33, 57) and 0.7 < slow / equal - 1 < 0.75

# %% [markdown]
# This is a quarter more work, and nearly three quarters more time: the other stages wait for the slow one.
#
# ## When formulas miss
#
# The formulas do not include messages. With `simulate(..., message=t)` each message takes the time t. A rank with other
# work loses no time meanwhile. A rank that waits for an answer loses 2 t, once for each direction.
#
# **Predict.** Which of the four schedules is the fastest if messages take no time, and which is the fastest if each
# message takes as long as two forward passes?

# %% tags=["stub"]
lab.predict("fastest-with-messages", {"no time": None, "two forward passes": None})  # "GPipe", "1F1B", ...

# %% tags=["solution"]
lab.predict("fastest-with-messages", {"no time": "ZB-H1", "two forward passes": "GPipe"})

# %%
times = [0, 0.25, 0.5, 1, 2]
series = {
    name: {t: explorer.simulate(name, 4, 8, message=t).makespan for t in times}
    for name in explorer.ORDERS
}
title = "4 ranks, 8 micro-batches, simulated; times in forward passes"
lab.pictures.lines(series, "message", "makespan", title=title, log="", form=".1f")

# %% tags=["statement"]
# "With slow messages GPipe is the fastest"
# "1F1B waits for an answer in every round, and interleaved 1F1B sends twice as many messages."
slow, none = row("2", "GPipe: makespan"), row("0", "GPipe: makespan")
assert min(slow) == slow[0] and min(none) == none[3]
grows = [late - early for late, early in zip(slow, none, strict=True)]
assert grows[0] == min(grows) == 2 * 3 * 2 and grows[2] == max(grows)

# %% [markdown]
# With slow messages GPipe is the fastest: it waits for them only at its beginning and its end. 1F1B waits for an answer
# in every round, and interleaved 1F1B sends twice as many messages.
#
# **Question 1.** GPT-3 (175 billion parameters, width 12,288) runs on 8 ranks, a sequence of 2,048 tokens per micro-batch.
# How long is a message, in forward passes of a stage, over 50 GB/s? A GPU does 250 TFLOP/s.
#
# <details><summary>Answer 1</summary>50 MB take 1 ms. A stage's forward pass is 2 x 22 billion x 2,048 operations, 0.36 s. So
# a message is 0.003: the left edge of the figure, where ZB-H1 is the fastest. On Ethernet of 10 Gb/s it is 0.11.</details>

# %% tags=["claim"]
# "So a message is 0.003: the left edge of the figure, where ZB-H1 is the fastest. On Ethernet of 10 Gb/s it is 0.11."
message, forward = 2 * 2048 * 12288, 2 * 175e9 / 8 * 2048 / 250e12
assert round(message / 1e6) == 50 and round(forward, 2) == 0.36
assert round(message / 50e9 / forward, 3) == 0.003 and round(message / 1.25e9 / forward, 2) == 0.11

# %% [markdown]
# **Predict.** In the simulator any number of messages can travel at once. A real link carries one message at a time.
# Now an EMULATED link does the same, with messages as long as 2 forward passes. Is the measured makespan of GPipe more
# than a tenth above the simulated one?

# %% tags=["stub"]
lab.predict("above-the-simulated", None)  # True or False

# %% tags=["solution"]
lab.predict("above-the-simulated", True)

# %% tags=["nbval-ignore-output"]
rows = []
for message in (0, 0.5, 2):
    simulated = explorer.simulate("GPipe", 4, 8, message=message).makespan
    on = explorer.measure("GPipe", 4, 8, message=message, one_by_one=True).simulation.makespan
    rows.append((message, formulas.makespan("gpipe", 4, 8), simulated, on))
title = "EMULATED network and stages; times in forward passes"
headers = ("message", "formula", "simulated", "measured, messages one by one")
lab.table(rows, headers, title, floats=".1f")
last = rows[-1]

# %% tags=["claim"]
# "If a message takes longer than the work between two messages, the network is the slowest stage."
assert all(measured > simulated for *_, simulated, measured in rows)

# %% [markdown]
# If a message takes longer than the work between two messages, the network is the slowest stage. And even without
# messages, real ranks start each action slightly late. So use formulas to estimate, a simulation with *your* times to
# choose, and a trace to be sure.
#
# ## GPipe's table 2
#
# Is such a simple simulation right about real machines? GPipe's table 2 has the throughput with K stages ("partitions")
# and M micro-batches, as a multiple of the throughput with K = 2 and M = 1. We simulate all nine cells: equal stages,
# recomputed forward passes, messages that take no time, and one batch, cut into M pieces.
#
# **Predict.** What does the simulation say for K = 8 and M = 32? (A pipeline takes M + K - 1 turns. In each turn a stage
# does 1 / (M K) of the work.)

# %% tags=["stub"]
lab.predict("throughput-of-eight-stages", None)

# %% tags=["solution"]
lab.predict("throughput-of-eight-stages", 6.56)

# %%
def throughput(p, m):
    """Batches per time; a backward pass takes 2, and 1 to recompute."""
    forward = 1 / (p * m)
    return 1 / simulate(gpipe(p, m), forward, 3 * forward).makespan


published = {}
for row in lab.published("gpipe_table2_throughput.csv"):
    cell = int(row["K_partitions"]), int(row["M_microbatches"])
    numbers = row["gpipe_normalised_throughput"], row["torchgpipe_P40_reproduction"]
    published.setdefault(cell, []).extend(f"{float(x):.2f}" for x in numbers if x)
rows = [
    (*cell, f"{throughput(*cell) / throughput(2, 1):.2f}", transformer, amoebanet, torchgpipe)
    for cell, (amoebanet, torchgpipe, transformer) in published.items()
]
works = "GPipe: Transformer", "GPipe: AmoebaNet", "torchgpipe: AmoebaNet"
lab.table(rows, ("K", "M", "simulated", *works))

# %% tags=["statement"]
# "With M = 32 the Transformer is within 8 % of the simulation, for each K."
# "Five cells of the Transformer are above the simulation, most of all K = 8 and M = 4: 4.80 published, 2.91 simulated."
# "Its 3.48 at K = 8 and M = 32 is about half of the simulation"
# "torchgpipe, which can balance stages by measured times, is closer for M = 4 and M = 32"
# "With M = 1 more stages gain little or nothing: 1.38 at most."
table = {(k, int(m)): numbers for k in (2, 4, 8) for m, *numbers in rows(f"{k}", under="GPipe: Transformer")}
assert len(table) == 9 and all(abs(table[k, 32][1] / table[k, 32][0] - 1) < 0.08 for k in (2, 4, 8))
above = {cell: numbers[1] / numbers[0] for cell, numbers in table.items() if numbers[1] > numbers[0]}
assert len(above) == 5 and max(above, key=above.get) == (8, 4) and table[8, 4][:2] == [2.91, 4.8]
assert table[8, 32][2] == 3.48 and 0.5 < 3.48 / table[8, 32][0] < 0.55
assert all(abs(ours - again) < abs(ours - first) for (_, m), (ours, _, first, again) in table.items() if m > 1)
assert max(number for (_, m), numbers in table.items() if m == 1 for number in numbers) == 1.38

# %% [markdown]
# With M = 1 more stages gain little or nothing: 1.38 at most. With M = 32 the Transformer is within 8 % of the simulation,
# for each K. So the simulation is good where stages are equal and micro-batches many.
#
# AmoebaNet's layers are hard to cut into equal stages, as GPipe's authors say. Its 3.48 at K = 8 and M = 32 is about
# half of the simulation; torchgpipe, which can balance stages by measured times, is closer for M = 4 and M = 32.
#
# Five cells of the Transformer are above the simulation, most of all K = 8 and M = 4: 4.80 published, 2.91 simulated. Equal
# stages cannot gain that much on one batch. The likely reason is that batches differ: "Batch size was adjusted to fit memory
# if necessary", says the table's caption. With more stages each accelerator has more memory left, and a larger batch keeps
# it busier. Our nine cells have one batch.
#
# **Discuss.** Which one number would you ask the authors for, to put the cell with 4.80 to the test?
#
# ## Who else?
#
# Three questions distinguish pipeline systems: when do the weights change, what does this cost, and who chooses the
# cuts?
#
# | system | weights change | the price | cuts |
# |---|---|---|---|
# | GPipe (2019), and lesson 07 | once a batch, on all stages | a bubble in each batch | yours |
# | PipeDream (2019) | after each minibatch, while others are under way | no bubble once full, but several versions of the weights; results differ from one process | a planner, from measured times |
# | HetPipe (2020) | after each minibatch; across pipelines, by parameter servers | no worker may be more than a few *waves* (minibatches in flight together) ahead of the slowest | GPUs of different kinds form *virtual workers*, each a pipeline |
# | DAPPLE (2021) | once a batch | 1F1B's bubble | a planner: stages, cuts, and copies of each stage |
#
# Since then: interleaved 1F1B (Megatron-LM, 2021), zero bubble (2024), DualPipe (DeepSeek-V3, 2024). torch has
# `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` and a variant,
# `ScheduleDualPipeV`.
#
# PipeDream's several versions are *weight stashing*. Between the forward and the backward pass of a minibatch its
# neighbours have changed the weights. So each stage keeps the weights of the forward pass until the backward pass has
# used them. PipeDream's schedule was 1F1B; today's systems run 1F1B synchronously, as DAPPLE does.
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("07b")

# %% [markdown]
# ## Summary
#
# - Branches run at the same time without micro-batches, but most models have no branches.
# - Cut by time, not by the number of layers: with one of four stages twice as slow, GPipe's makespan is 57 instead of 33.
# - Slow messages hurt most where a rank waits for an answer in every round.
# - Simulate with your own times; trust a trace.
#
# The [exercises](../exercises/07_pipelines_exercises.ipynb) are those of lesson 07.
#
# ## References
#
# - Y. Huang et al.: GPipe. NeurIPS, 2019. C. Kim et al.: torchgpipe. arXiv:2004.09910, 2020.
# - D. Narayanan et al.: PipeDream: generalized pipeline parallelism for DNN training. SOSP, 2019.
# - J. H. Park et al.: HetPipe: enabling large DNN training on (whimpy) heterogeneous GPU clusters through integration of
#   pipelined model parallelism and data parallelism. USENIX ATC, 2020.
# - S. Fan et al.: DAPPLE: a pipelined data parallel approach for training large models. PPoPP, 2021.
