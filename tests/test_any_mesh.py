"""``dtlib train decoder`` on every mesh of four ranks: one curve, held memory, a limit that is enforced."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dtlib
from dtlib.parallel.context.order import ORDERS
from dtlib.planner import DEVICES, Model, Plan, PlanError
from dtlib.planner.configs import for_dtlib
from dtlib.planner.estimate import plans
from dtlib.planner.exact import ELEMENT, of_decoder
from dtlib.training import config
from dtlib.training.run import train
from dtlib.training.run_config import read
from dtlib.workloads import decoder
from dtlib.workloads.shared_tokens import Shared
from tests.cases import refuses
from tests.ranks import on_ranks

OWN = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "test_samples": 6}
SIZES = Model(2, 16, 4, 256, 8, tied=False)
CONFIG = {
    "workload": OWN, "run": {"steps": 3, "float64": True}, "train_batch_size": 8, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-4}},
}  # fmt: skip
EXPERTS = {**OWN, "experts": 4, "top": 2}
MESHES = (
    {"tensor": 4}, {"tensor": 2}, {"tensor": 2, "zero": 1}, {"tensor": 2, "zero": 2}, {"tensor": 2, "zero": 3},
    {"tensor": 2, "pipe": 2}, {"pipe": 2}, {"pipe": 2, "zero": 1}, {"pipe": 4}, {"zero": 3},
    {"context": 4}, {"context": 2}, {"context": 2, "zero": 1}, {"context": 2, "zero": 3}, {"context": 2, "tensor": 2},
    {"context": 2, "pipe": 2}, {"context": 2, "order": "contiguous"}, {"context": 4, "method": "ulysses"},
)  # fmt: skip


def config_of(tensor=1, pipe=1, zero=0, context=1, expert=1, order="zigzag", method="ring", **more):
    axes = {"tensor_parallel": {"autotp_size": tensor}, "pipeline": {"stages": pipe}}
    axes |= {
        "context_parallel": {"size": context, "order": order, "method": method},
        "expert_parallel": {"size": expert},
    }
    return {**CONFIG, **axes, "zero_optimization": {"stage": zero}, **more}


@on_ranks(4, slow=(4,))
def test_every_mesh_has_the_curve_of_one_rank(world, tmp_path):
    alone = world.comm.split(world.rank)
    expected = train("decoder", config_of(), comm=alone)
    assert expected["losses"][0] > expected["losses"][-1] and len(expected["losses"]) == 3
    for mesh in MESHES:
        found = train("decoder", config_of(**mesh))
        for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
            assert abs(mine - theirs) < 1e-11, (mesh, found["losses"], expected["losses"])
        assert abs(found["test_loss"] - expected["test_loss"]) < 1e-6, mesh
        assert (found["tensor"], found["stages"]) == (mesh.get("tensor", 1), mesh.get("pipe", 1))

    # Plans, as they are written down.
    for plan in (
        Plan(context=2, data=2, zero=1, batch=8, micro_batch=2, recompute="full"),
        Plan(context=4, batch=8, micro_batch=4, context_algorithm="ulysses", recompute="selective"),
        Plan(context=2, tensor=2, batch=8, micro_batch=4),
    ):
        found = train("decoder", {**for_dtlib(SIZES, plan), "run": CONFIG["run"], "optimizer": CONFIG["optimizer"]})
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-11), plan

    # Checkpoints of tensor ranks: from one mesh of data and pipe axes to another.
    folder = tmp_path
    steps = config_of(tensor=2, zero=1)
    train("decoder", steps, save=folder, steps=2)
    resumed = train("decoder", steps, save=folder, resume=True)
    assert len(resumed["losses"]) == 1 and abs(resumed["loss"] - expected["loss"]) < 1e-11

    # What is refused, on all ranks.
    for wrong, says in (
        ({"tensor": 3}, "tensor_parallel.autotp_size is 3, but there are 4 ranks"),
        ({"tensor": 4, "pipe": 2}, "2 stages of 4 tensor ranks are 8, but there are 4 ranks"),
        ({"run": {"steps": 2, "memory_limit": 10_000}}, "bytes of model states and buffers, and run.memory_limit"),
    ):
        refuses(says, train, "decoder", config_of(**wrong))
    for wrong, says in (
        ({"context": 3}, "context_parallel.size is 3, but there are 4 ranks"),
        ({"context": 4, "tensor": 2}, "1 stages of 2 tensor ranks, 4 context ranks are 8, but there are 4 ranks"),
        ({"context": 4, "workload": {**OWN, "seq": 12}}, "seq is 12, but 4 context ranks need equal parts"),
        ({"context": 2, "order": "spiral"}, "order 'spiral' and method 'ring': choose an order from contiguous"),
        ({"context": 4, "method": "ulysses", "workload": {**OWN, "heads": 2}}, "2 heads do not divide into 4 groups"),
        ({"context_parallel": {"sise": 2}}, "context_parallel.sise is no key of the config: did you mean 'size'"),
        ({"expert": 2}, "expert_parallel.size is 2, but workload.experts is 0"),
        ({"expert": 4, "workload": {**OWN, "experts": 6}}, "size is 4, but workload.experts is 6"),
        ({"zero": 1, "workload": EXPERTS}, "workload.experts is 4, and zero_optimization.stage is set"),
        ({"pipe": 2, "workload": EXPERTS}, "and pipeline.stages is set"),
        ({"tensor": 2, "workload": EXPERTS}, "and tensor_parallel.autotp_size is set"),
        ({"gradient_clipping": 1.0, "workload": EXPERTS}, "and gradient_clipping is set"),
        ({"workload": {**EXPERTS, "top": 3}}, "top of the decoder workload is 3, of 4 experts"),
    ):
        refuses(says, train, "decoder", config_of(**wrong))
    refuses("only layers of `dtlib train decoder`", train, "vision", {**config_of(tensor=2), "workload": {}})
    refuses("runtime=dtlib", train, "decoder", config_of(tensor=2), runtime="torch")
    told = []
    slow = {"steps": 2, "link_latency": 0.001, "link_bandwidth": 1e6, "memory_limit": 10**9}
    train("decoder", config_of(run=slow), after_step=lambda step, loss: told.append(step))
    assert told == [1, 2]


def kept_of_decoder(model: Model, micro_batch: int, recompute: str) -> int:
    """Bytes that autograd keeps until the backward pass of a micro-batch of n tokens, in float32. Elements of a layer:

        none        16 n h   inputs of both norms and of four matrices (the last has 4 h), q, k, v, and 4 h before GELU
                    + n a + 4 n    what attention's softmax was divided by; mean and deviation of both norms
        selective   all of it but n a
        full        n h      its input

    Beside the layers: the head's input, n h, the loss's log-probabilities, n V, and bytes in 64 bits, twice.
    """
    n, h = micro_batch * model.seq, model.hidden
    layer = {"none": 16 * h + 4 + model.heads, "selective": 16 * h + 4, "full": h}[recompute]
    return ELEMENT * (n * (model.layers * layer + h + model.vocab) + 1) + 2 * 8 * n


def test_activations_are_those_of_the_formula_and_full_recomputation_is_one_more_forward_pass():
    passes = {}
    for recompute in decoder.RECOMPUTE:
        work = decoder.workload({**OWN, "recompute": recompute})
        x, y = torch.utils.data.default_collate([work.train[place] for place in range(3)])
        with dtlib.memory(work.model) as memory, dtlib.trace() as trace:
            work.loss_fn(work.model(x), y).backward()
        assert memory.activations == kept_of_decoder(SIZES, 3, recompute), recompute
        passes[recompute] = sum(event.name == "forward" for event in trace.events)
        found = [parameter.grad.clone() for parameter in work.model.parameters()]
        first = passes.setdefault("gradients", found)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, first, strict=True)), recompute
    layers = OWN["layers"]
    assert (passes["none"], passes["selective"], passes["full"]) == (layers, layers, 2 * layers)
    refuses("recompute of the decoder workload is 'half'", decoder.workload, {"recompute": "half"})


def test_the_decoder_is_the_planners_model_and_its_plans_are_configs():
    work = decoder.workload(OWN)
    assert sum(parameter.numel() for parameter in work.model.parameters()) == SIZES.parameters
    plan = Plan(tensor=2, pipe=2, batch=8, micro_batch=2, recompute="selective")
    made = for_dtlib(SIZES, plan)
    assert made["tensor_parallel"] == {"autotp_size": 2} and made["pipeline"]["stages"] == 2
    assert made["workload"] == {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "recompute": "selective"}
    # Whatever the planner proposes for four ranks is written, or refused with its numbers; what is written is read.
    refused = Counter()
    for model in (SIZES, replace(SIZES, experts=4, active=2)):
        for context in (1, 2, 4):
            for plan in plans(model, 4, DEVICES["h100"], 16, Counter(), context=context):
                try:
                    made = for_dtlib(model, plan)
                except PlanError as problem:
                    refused[str(problem).split(". Use a")[-1].split(": ")[-1]] += 1
                    continue
                made_by, _, rest, axes, sequences = read("decoder", made, SimpleNamespace(size=4), None, None, "dtlib")
                assert made_by.keywords == {} and made_by.args == (made["workload"],)
                asked = plan.pipe, plan.context, plan.expert, plan.tensor
                assert tuple(axes[name] for name in ("pipe", "context", "expert", "tensor")) == asked
                assert sequences.size == context
                found = config.read(rest, plan.data * plan.context)
                micro = plan.micro_batch / plan.context
                assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (16, micro)
                assert found.gradient_accumulation_steps == plan.micro_batches
                decoder.settings(made["workload"], decoder.DEFAULTS, "decoder")
                refused["written"] += 1
    assert refused["written"] > 100 and len(refused) == 5, refused
    with pytest.raises(PlanError, match="seq is 8, but 8 context ranks of dtlib train need equal parts"):
        for_dtlib(SIZES, Plan(context=8, batch=8, micro_batch=8))
    with pytest.raises(PlanError, match="give a pipe axis that divides the 3 layers"):
        of_decoder(replace(SIZES, layers=3), Plan(pipe=2, batch=8), 0)


@on_ranks(4, slow=(4,))
def test_every_mesh_of_experts_has_the_curve_of_one_rank(world, tmp_path):
    """One micro-batch a step: the balance is that of a micro-batch."""
    config = {"workload": EXPERTS, "gradient_accumulation_steps": 1}
    expected = train("decoder", config_of(**config), comm=world.comm.split(world.rank))
    mixture = replace(SIZES, experts=4, active=2)
    plan = Plan(data=4, expert=2, batch=8, micro_batch=2, recompute="full")
    written = {**for_dtlib(mixture, plan), "run": CONFIG["run"], "optimizer": CONFIG["optimizer"]}
    for axes in ({}, {"expert": 2}, {"expert": 4}, {"expert": 2, "context": 2}, written):
        found = train("decoder", axes if axes is written else config_of(**axes, **config))
        for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
            assert abs(mine - theirs) < 1e-11, (axes, found["losses"], expected["losses"])
        if axes is not written:  # it tests more samples
            assert abs(found["test_loss"] - expected["test_loss"]) < 1e-6, axes
    folder = tmp_path
    train("decoder", config_of(expert=4, **config), save=folder, steps=2)
    resumed = train("decoder", config_of(expert=2, **config), save=folder, resume=True)
    assert len(resumed["losses"]) == 1 and abs(resumed["loss"] - expected["loss"]) < 1e-11


@on_ranks(2, 3)
def test_a_context_axis_has_some_tokens_of_all_sequences(world):
    comm, seq = world.comm, 4 * world.size
    x = torch.arange(2 * seq).view(2, seq) + 1000 * comm.rank
    everyones = torch.cat(comm.all_gather_object(x))
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, comm.size, seq, 4, dtype=torch.float64)
    expected = scaled_dot_product_attention(*qkv, is_causal=True)
    for order in ORDERS:
        for method in ("ring", "ulysses"):
            shared = Shared(comm, order, method)
            here = shared.positions(seq)
            assert torch.equal(shared.tokens(x), everyones[:, here])
            out = shared.attention(*qkv[..., here, :])
            assert (out - expected[..., here, :]).abs().max() <= 1e-12, (order, method)
