"""The planner against published tables, on rows that it was not fitted on, and against itself."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from dtlib.planner import (
    CALIBRATIONS,
    DEVICES,
    MODELS,
    Model,
    Plan,
    PlanError,
    check,
    days_of,
    estimate,
    from_transformers,
    memory,
    save_interval,
    search,
    step_bytes,
)  # fmt: skip
from dtlib.planner.memory import layer_activations
from dtlib.planner.model import GIB
from dtlib.planner.time import parts, work
from dtlib.theory.zero import GB, zero_bytes
from tests.cases import refuses
from tools import planner as page
from tools import planner_fit as fits

A100, H100 = DEVICES["a100"], DEVICES["h100"]
LLAMA = replace(MODELS["llama3-8b"], seq=4096)


# Published figures that need no fit.


def test_zeros_tables():
    """Table 1, all of its 54 cells, as they are printed: rounded, or cut off where they have no point. Table 2 gives
    half a trillion parameters for 512 billion."""
    cells = 0
    for row in fits.published("zero_table1_model_state_memory_gb"):
        parameters = int(float(row["params_billion"]) * 1e9)
        for stage, column in enumerate(("Pos_GB", "Pos_g_GB", "Pos_g_p_GB"), start=1):
            says = sum(zero_bytes(parameters, int(row["dp_degree"]), stage).values()) / GB
            assert rounds_to(says, row[column]) or ("." not in row[column] and int(says) == int(row[column])), row
            cells += 1
    assert cells == 54
    for row in fits.published("zero_table2_max_model_size_billion"):
        room = 32 * GB * int(row["mp"])
        for stage, column in enumerate(("baseline_theory", "Pos_theory", "Pos_g_theory", "Pos_g_p_theory")):
            each = sum(zero_bytes(10**6, int(row["dp"]), stage).values()) / 1e6
            assert room / each / 1e9 == pytest.approx(float(row[column]), rel=0.03)  # the paper rounds to 0.5T, 1T, 2T
            cells += 1
    assert cells == 54 + 12


def rounds_to(value: float, published: str) -> bool:
    digits = len(published.partition(".")[2])
    return abs(value - float(published)) <= 0.5001 * 10**-digits


def test_parameters_of_megatrons_tables():
    for row in fits.published("megatron2021_table1_weak_scaling"):
        model = Model(int(row["layers"]), int(row["hidden_size"]), int(row["attention_heads"]), 51200, 2048)
        assert rounds_to(model.parameters / 1e9, row["params_billion"]), row
    for row in fits.published("megatron_core_h100_weak_scaling"):
        sizes = (int(row[name]) for name in ("layers", "hidden_size", "attention_heads", "vocab"))
        model = Model(*sizes, 4096, tied=False)
        rotary = model.parameters - model.seq * model.hidden  # no parameters of positions
        # The name of the largest is 0.007 % above what rounds to it.
        assert rounds_to(rotary / 1e9 * (1 + 1e-4 * (row["model"] == "462B")), row["model"].removesuffix("B")), row


def days(operations: float, gpus: int, operations_per_second: float) -> float:
    """D. Narayanan et al., SC 2021, section 5.1: 8 T P operations for T tokens and P parameters, with recomputation."""
    return operations / (gpus * operations_per_second) / 86400


def test_days_of_megatrons_tables():
    """Published days lie between those of the TFLOP/s rounded up and down."""
    sizes = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
    rows = fits.published("megatron_ptd_vs_zero3")
    for row in rows:
        model = Model(*sizes[row["params_billion"]], 51200, 2048)
        operations = model.operations(300e9, again=True)
        tflops = float(row["achieved_tflops_per_gpu"])
        most, least = (days(operations, int(row["gpus"]), (tflops + off) * 1e12) for off in (-0.5, 0.5))
        assert least - 0.5 <= float(row["days_for_300B_tokens"]) <= most + 0.5, row
    assert len(rows) == 12
    assert round(days(8 * 300e9 * 175e9, 1024, 140e12)) == 34
    trillion = Model(128, 25600, 160, 51200, 2048)
    assert round(days(8 * 450e9 * trillion.parameters, 3072, 163e12)) == 84


def test_activations_of_korthikantis_figure():
    sizes = {"22B": (6144, 64, 48), "175B": (12288, 96, 96), "530B": (20480, 128, 105), "1T": (25600, 160, 128)}
    for row in fits.published("korthikanti2022_fig7_activation_percent"):
        hidden, heads, layers = sizes[row["model"]]
        for name, says in page.percent_of_activations(Model(layers, hidden, heads, 51200, 2048)).items():
            assert says == pytest.approx(float(row[name]), abs=0.2), (row["model"], name)


def test_memory_of_torchtitan_without_any_fit():
    rows = fits.torchtitan()
    off = fits.bytes_of(rows) / GIB / [row.gib for row in rows] - 1
    assert np.abs(off).mean() <= 0.05, off
    assert np.abs(off).max() <= 0.15, off


# Rows that were left out of the fit.


@pytest.mark.parametrize("name,most", (("a100-node", 0.15), ("a100-cluster", 0.15), ("h100-cluster", 0.20)))
def test_a_whole_size_left_out(name, most):
    rows, device, expected, _ = page.SETS[name]
    off = fits.left_out(rows(), device, expected)
    assert len(off) in (2, 4)
    assert all(np.abs(each).mean() <= most for each in off.values()), {k: np.abs(v).mean() for k, v in off.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,most,largest", (("a100-node", 0.09, 0.09), ("a100-cluster", 0.10, 0.08), ("h100-cluster", 0.20, 0.20))
)
def test_random_halves_and_their_bands(name, most, largest):
    rows, device, expected, _ = page.SETS[name]
    found = fits.halves(rows(), device, expected)
    assert len(found) == 20
    mean = {key: np.mean([each[key] for each in found]) for key in found[0]}
    assert mean["error"] <= most, mean
    assert mean["largest"] <= largest, mean
    assert 0.80 <= mean["covered"] <= 0.95, mean


def test_families_that_their_fit_has_not_seen():
    """Errors and bands inside of a calibration and outside; the page has a row for each family, and its picture."""
    found = page.planner_families.families({name: known.speeds for name, known in CALIBRATIONS.items()})
    some = {
        "inside": [each for each in found if each.inside],
        "papers": [each for each in found if each.name == "all"],
        "pipes": [each for each in found if not each.inside and each.name != "all"],
    }
    off = {name: np.concatenate([e.predicted / e.measured - 1 for e in each]) for name, each in some.items()}
    held = {name: np.concatenate([e.held for e in each]).mean() for name, each in some.items()}
    assert [len(each) for each in off.values()] == [sum(known.rows for known in CALIBRATIONS.values()), 99, 730]
    assert np.abs(off["inside"]).mean() <= 0.12 and np.abs(off["papers"]).mean() <= 0.18, off
    assert all(share >= 0.85 for share in held.values()), held
    with page.planner_families.ROWS.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == sum(map(len, off.values()))
    text = page.PAGE.read_text(encoding="utf-8")
    assert all(f"| {each.source} | `{each.file}.csv` | {each.name} | {len(each.measured)} |" in text for each in found)
    assert all((fits.DATA / f"{each.file}.csv").exists() for each in found)
    assert f"({page.planner_families.PICTURE.name})" in text and page.planner_families.PICTURE.exists()


@pytest.mark.parametrize("known,asked", (("1B", "8B"), ("8B", "1B")))
def test_what_fits_on_the_scan(known, asked):
    rows = [row for row in fits.scan() if row.plan.pipe <= 8]
    usable = fits.usable_share([row for row in rows if row.group == known])
    says = fits.judged([row for row in rows if row.group == asked], usable)
    assert says["F1"] >= 0.93, says
    assert says["recall"] >= 0.98, says
    assert says["F1"] > says["always"] + 0.05


def test_another_framework_at_lengths_that_were_seen():
    """LLM Foundry's rows up to 8,192 tokens, on which nothing was fitted."""
    rows = page.another_framework({name: known.speeds for name, known in CALIBRATIONS.items()}).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert {cell[0] for cell in cells} == {"a100", "h100"} and sum(int(cell[2]) for cell in cells) == 76
    for _, length, _, mean, _ in cells:
        assert float(mean.removesuffix(" %")) < (20 if "more" not in length else 75)


def test_coefficients_stay_in_their_ranges():
    for known in CALIBRATIONS.values():
        for name, (_, _, low, high, _) in fits.EXPECTED.items():
            value = getattr(known.speeds, name)
            assert value > 0
            assert value <= high * 1.001 and (value >= low * 0.999 or name == "hidden")
        assert known.band[0] < 1 < known.band[1]


def test_the_stored_coefficients_are_those_of_the_fit():
    rows, device, expected, _ = page.SETS["a100-cluster"]
    made = fits.fit(*fits.amounts(rows(), device), expected)
    stored = CALIBRATIONS["a100-cluster"].speeds
    done, _ = fits.amounts(rows(), device)
    assert np.allclose(fits.seconds(done, made), fits.seconds(done, stored), rtol=0.02)


# The planner against itself.


def test_twice_the_data_ranks_halve_the_compute():
    plan = Plan(data=8, tensor=4, batch=256, micro_batch=2)
    one, two = work(LLAMA, plan, H100), work(LLAMA, replace(plan, data=16), H100)
    assert two.micro_batches * 2 == one.micro_batches
    for name in ("matrices", "attention", "traffic", "head", "passes", "layers"):
        assert getattr(one, name) == getattr(two, name)


def test_stages_1_and_2_send_the_same():
    plan = Plan(data=8, batch=8, zero=1)
    sent = [step_bytes(LLAMA, replace(plan, zero=stage))["data"] for stage in (1, 2, 3)]
    assert sent[0] == sent[1] < sent[2]


def test_sequence_parallelism_changes_no_volume_of_layers():
    plan = Plan(tensor=8, batch=4, sequence_parallel=False)
    assert step_bytes(LLAMA, plan)["tensor"] == step_bytes(LLAMA, replace(plan, sequence_parallel=True))["tensor"] > 0
    assert layer_activations(LLAMA, plan) > layer_activations(LLAMA, replace(plan, sequence_parallel=True))


@pytest.mark.parametrize(
    "schedule,chunks", (("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble_h1", 1))
)
def test_the_bubble_goes_to_zero(schedule, chunks):
    def share(batch):
        plan = Plan(pipe=4, batch=batch, schedule=schedule, chunks=chunks)
        by = parts(work(LLAMA, plan, H100), CALIBRATIONS["h100-cluster"].speeds)
        return by["bubble"] / sum(by.values())

    shares = [share(4**power) for power in range(1, 9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.05 and shares[-1] < 1e-3


def test_memory_grows_with_batch_and_length():
    for change in ("micro_batch", "seq"):
        held = []
        for factor in (1, 2, 4, 8):
            plan = Plan(data=8, zero=3, batch=64 * 8, micro_batch=factor if change == "micro_batch" else 1)
            model = replace(LLAMA, seq=1024 * factor) if change == "seq" else LLAMA
            held.append(memory(model, plan).total)
        assert held == sorted(held) and held[0] < held[-1]
    for zero in (1, 2, 3):
        small = memory(LLAMA, Plan(data=8, zero=zero, batch=8, scheme="mixed_adam")).states
        assert small < memory(LLAMA, Plan(data=8, zero=zero - 1, batch=8, scheme="mixed_adam")).states


def test_gb_against_gib_and_16_against_18_bytes():
    model = Model(36, 4096, 32, 51200, 2048)
    by = {
        scheme: memory(model, Plan(scheme=scheme)).states for scheme in ("mixed_adam", "mixed_adam_float32_gradients")
    }
    assert by["mixed_adam"] == 16 * model.parameters
    assert by["mixed_adam_float32_gradients"] == 18 * model.parameters
    assert GIB / GB == 1.073741824


def test_experts_are_shared_out_and_chosen():
    model = MODELS["mixtral-8x7b"]
    assert model.parameters / 1e9 == pytest.approx(46.7, abs=0.1)
    whole, cut = (memory(model, Plan(data=8, expert=expert, batch=8)).parameters for expert in (1, 8))
    assert cut < whole / 4
    assert (
        step_bytes(model, Plan(data=8, expert=8, batch=8))["expert"]
        > step_bytes(model, Plan(data=8, batch=8))["expert"]
        == 0
    )
    dense = replace(model, experts=0, active=1)
    assert model.operations(1) > 1.5 * dense.operations(1)


def test_long_sequences_are_cut():
    model = replace(LLAMA, seq=131072)
    plan = Plan(data=1, context=8, zero=3, batch=1, recompute="full")
    assert (
        memory(model, plan).activations
        == memory(model, Plan(data=8, zero=3, batch=8, recompute="full")).activations / 8
    )
    ring, ulysses = (step_bytes(model, replace(plan, context_algorithm=how))["context"] for how in ("ring", "ulysses"))
    assert 0 < ulysses < ring


# What a learner asks.


@pytest.mark.parametrize(
    "change,says",
    (
        ({"data": 3}, "= 3 GPUs, but there are 8"),
        ({"data": 1, "tensor": 8, "batch": 3, "micro_batch": 2}, "A batch of 3 is not a multiple of data 1 x micro"),
        ({"tensor": 3}, "tensor is 3, and heads are 32"),
        ({"pipe": 64}, "64 stages are more than the 32 layers"),
        ({"context": 3}, "context is 3, and the sequence's tokens are 4096"),
        ({"expert": 2}, "expert is 2, and the model's experts are 0: give 1."),
        ({"zero": 4}, "zero is 4: choose one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute is 'some': choose one of none, selective, operators, full"),
        ({"chunks": 2}, "chunks is 2"),
        ({"batch": 0}, "batch is 0"),
        ({"micro_batch": 1.5}, "micro_batch is 1.5"),
        ({"schedule": "interleaved", "pipe": 8, "batch": 12, "chunks": 2}, "12 micro-batches are not a multiple"),
        ({"context": 8, "tensor": 8, "context_algorithm": "ulysses"}, "tensor x context is 64, and heads are 32"),
    ),
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_numbers(change, says):
    with pytest.raises(PlanError) as refused:
        check(LLAMA, replace(Plan(), **change), 8 if "data" in change else None)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 200


def test_a_model_that_cannot_be_is_refused():
    refuses("hidden is 4096, and 33 heads", Model, 32, 4096, 33, 32000, 4096, error=PlanError)
    refuses("layers is 0", Model, 0, 4096, 32, 32000, 4096, error=PlanError)


def test_why_it_does_not_fit_and_what_would():
    model = MODELS["llama3-8b"]
    says = estimate(model, Plan(data=8, batch=64, micro_batch=8), H100)
    assert not says.fits
    assert "Does not fit" in says.why_not and "activations" in says.why_not and "It would with" in says.why_not
    cured = estimate(model, Plan(data=8, batch=64, micro_batch=1, zero=3, recompute="full"), H100)
    assert cured.fits and cured.why_not == ""
    alone = estimate(MODELS["llama3-70b"], Plan(batch=1), H100)
    assert alone.why_not.endswith("Cut it over more GPUs.")


def test_it_says_what_was_never_measured():
    known = estimate(Model(24, 2048, 16, 51200, 1024), Plan(data=4, tensor=2, batch=32), A100)
    assert known.outside == () and known.low < known.seconds < known.high and "about" not in str(known)
    far = estimate(MODELS["llama3-405b"], Plan(data=64, tensor=8, pipe=16, batch=1024), H100)
    text = str(far)
    assert "about" in text and "pipe 16 is outside of what was measured (1 to 1)" in text
    other = estimate(LLAMA, Plan(data=8, batch=256), DEVICES["b200"])
    assert any("There is no measurement for b200" in each for each in other.outside)
    assert other.high / other.low > known.high / known.low


def test_the_best_plans_are_those_that_fit_and_are_fastest():
    best, tried = search(LLAMA, 16, H100, batch=256)
    assert 0 < len(best) <= 10 and all(each.fits for each in best)
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert {each.plan.gpus for each in tried} == {16}
    assert len({(e.plan.data, e.plan.tensor, e.plan.pipe) for e in tried}) == len(tried) >= 10
    with pytest.raises(PlanError, match="No plan for 7 GPUs and a batch of 256"):
        search(replace(LLAMA, layers=2), 7, H100, batch=256)
    given, _ = search(LLAMA, 16, H100, batch=256, zero=3)
    assert {each.plan.zero for each in given} == {3}


@pytest.mark.timeout(60)
def test_many_gpus_end_in_seconds():
    """720,720 has 240 divisors, and each mesh has many variants."""
    deep = Model(128, 4096, 32, 50257, 16384)
    best, tried = search(deep, 720720, H100, batch=720720)
    assert best and len(tried) > 500 and all(each.plan.gpus == 720720 for each in tried)


def test_sums_of_a_run():
    assert days_of(10.0, 1e12, 1e9) == pytest.approx(10 * 1000 / 86400)
    assert save_interval(60, 3 * 3600) == pytest.approx((2 * 60 * 3 * 3600) ** 0.5)
    assert estimate(LLAMA, Plan(data=8, batch=256), H100).mfu < 0.7


def test_a_config_of_transformers():
    llama = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_act": "silu",
        "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    assert from_transformers(llama) == replace(MODELS["llama3-8b"], name="llama")
    gpt = {
        "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
        "activation_function": "gelu_new",
    }  # fmt: skip
    assert from_transformers(gpt).parameters / 1e6 == pytest.approx(124.4, abs=0.1)
    with pytest.raises(PlanError, match="no hidden_size nor n_embd"):
        from_transformers({"num_attention_heads": 4, "num_hidden_layers": 2})


def test_heads_wider_than_hidden_gated_gelu_and_many_experts():
    """Sizes as their config.json has them, and the parameters that their model cards give, in billions."""
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    untied = {"tie_word_embeddings": False, "max_position_embeddings": 8192, "hidden_act": "silu"}
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    gemma = {
        "model_type": "gemma", "hidden_act": "gelu", "hidden_size": 3072, "num_hidden_layers": 28, "vocab_size": 256000,
        "intermediate_size": 24576, **dict(zip(heads, (16, 16, 256), strict=True)), **tied,
    }  # fmt: skip
    qwen = {
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 151936,
        "intermediate_size": 25600, **dict(zip(heads, (64, 8, 128), strict=True)), **untied,
    }  # fmt: skip
    experts = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        **dict(zip(heads, (32, 4, 128), strict=True)), **untied,
    }  # fmt: skip
    found = [from_transformers(config).parameters / 1e9 for config in (gemma, qwen, experts)]
    assert found == pytest.approx([8.54, 32.8, 30.5], rel=0.005)
    assert from_transformers(experts).active == 8
    for key in ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size"):
        refuses(f"has {key}, which the planner does not know", from_transformers, {**qwen, key: 512}, error=PlanError)


def test_the_parts_of_memory_by_hand():
    """Each of the smaller parts by its formula in the docstring, in bytes."""
    n, h, v = LLAMA.seq, LLAMA.hidden, LLAMA.vocab
    cut = memory(LLAMA, Plan(tensor=8, batch=1))
    assert cut.logits == n * (18 * v / 8 + 2 * h)
    assert memory(LLAMA, Plan(tensor=8, batch=1, sequence_parallel=False)).logits == n * 18 * v / 8
    assert memory(LLAMA, Plan(batch=1)).logits == 14 * n * v
    layer = layer_activations(LLAMA, Plan(tensor=8), "none")
    assert cut.working == layer + 4 * n * h
    assert memory(LLAMA, Plan(data=4, zero=3, batch=4)).gathered == 2 * (LLAMA.layer_parameters + LLAMA.embedding)
    pipe = memory(LLAMA, Plan(pipe=4, data=2, zero=3, batch=32, recompute="full"))
    own = 8 * LLAMA.layer_parameters + LLAMA.embedding
    assert pipe.stage in (0, 3) and pipe.gathered == 6 * (own + LLAMA.layer_parameters)
    under_way = 4 if pipe.stage == 0 else 1
    assert pipe.messages == (2 * 16 + under_way) * 2 * n * h
    assert pipe.activations == under_way * 8 * 2 * n * h
    odd = Model(1, 8, 2, 7, 4)
    held = memory(odd, Plan(data=7, zero=1, batch=7, scheme="adam"))
    padding = -odd.parameters % 7 * 8
    assert padding and held.parameters == 4 * odd.parameters + padding
