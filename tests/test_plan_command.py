"""`dtlib plan` and `lab.plan()`: what is asked, what is shown, what is written down for others."""

import json
import os
import re
from dataclasses import replace
from importlib import import_module

import pytest

from dtlib.cli import main
from dtlib.planner import DEVICES, MODELS, Plan, PlanError, configs, estimate, report
from dtlib.planner.command import fixed_of, model_of, plan_for
from dtlib.planner.model import GIB
from tests.cases import refuses
from tests.conftest import ROOT

LLAMA = MODELS["llama3-8b"]


def test_a_table_a_map_and_the_best_in_full(capsys):
    assert main(["plan", "llama3-8b", "--gpus", "16", "--batch", "256", "--seq", "4096", "--tokens", "1e12"]) == 0
    said = capsys.readouterr().out
    for words in (
        "nine of ten steps are expected", "\n1=: ", "memory per GPU", "\n~: nothing like it was measured", "tokens/s",
        "tensor 1", "pipe 2", "memory", "sent a rank, a step", "days", "GiB",
    ):  # fmt: skip
        assert words in said, words
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    "line,says",
    (
        ("llama3-8b --seq 32768 --fixed zero=1,pipe=1", "seq 32768 is outside of what was measured (4096 to 4096)."),
        ("llama3-8b --seq 32768 --device a100", "seq 32768 is outside of what was measured ("),
        ("llama3-8b --seq 4096 --fixed zero=1,pipe=4", "pipe 4 is outside of what was measured (1 to 1)."),
    ),
)
def test_where_nothing_was_measured_it_gives_two_digits_and_says_why(line, says, capsys):
    """Beyond 8,192 tokens, and for pipelines on H100: docs/explanation/how_far_off_the_planner_is.md."""
    assert main(f"plan {line} --gpus 16 --batch 256 --tokens 1e12".split()) == 0
    said = capsys.readouterr().out
    assert says in said and "about" in said and "nothing was fitted" in said
    row = r"^(?:1=|\d+) +(?:data|tensor|pipe|context) \d+ .* (~[\d.]+) +[\d.]+ +[\d.]+ +(~[\d,]+) k +(~\d+)% +[\d.]+ *$"
    rows = re.findall(row, said, re.MULTILINE)
    assert rows and all(
        len(value.strip("~0.,").replace(",", "").replace(".", "")) <= 2 for row in rows for value in row
    )


def test_the_example_of_the_docs_has_an_answer_inside_of_what_was_measured(capsys):
    page = (ROOT / "docs" / "how-to" / "plan_a_run.md").read_text()
    [line] = re.findall(r"^    dtlib (plan (?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert main(line.replace("\\\n", " ").split()) == 0
    said = capsys.readouterr().out
    assert "~" not in said and "1=" not in said
    rows = [row.rstrip() for row in said.splitlines() if re.match(r"\d .*data|--  ", row)]
    assert len(rows) == 4 and all(f"    {row}\n" in page for row in rows)


def test_as_json(capsys):
    sizes = "layers=24,hidden=2048,heads=16,vocab=51200,seq=1024"
    line = f"plan {sizes} --gpus 8 --device a100 --batch 64 --json --fixed micro_batch=4,zero=0"
    assert main(line.split()) == 0
    best = json.loads(capsys.readouterr().out)
    assert 1 <= len(best) <= 10
    assert all(each["plan"]["micro_batch"] == 4 and each["low"] < each["seconds"] < each["high"] for each in best)
    assert best[0]["outside"] == []


@pytest.mark.parametrize(
    "line,says",
    (
        ("plan gpt5", "There is no model 'gpt5': pass one of"),
        ("plan llama3-8b --device tpu", "There is no device 'tpu': choose one of"),
        ("plan llama3-8b --gpus 0", "--gpus is 0: give a whole number from 1"),
        ("plan llama3-8b --fixed zero=9", "zero is 9: choose one of 0, 1, 2, 3"),
        ("plan llama3-8b --fixed recompute=half", "recompute is 'half': choose one of"),
        ("plan llama3-8b --fixed zeros=1", "'zeros=1' is nothing of a plan"),
        ("plan llama3-8b --fixed zero=x", "zero is 'x': give a whole number"),
        ("plan layers=2,hidden=64", "heads, vocab, seq is missing"),
        ("plan layers=2,hidden=64,heads=3,vocab=9,seq=8", "hidden is 64, and 3 heads"),
        ("plan llama3-8b --write no/where/x.dtlib.json", "cannot be written"),
        ("plan llama3-405b --gpus 8 --write x.dtlib.json", "Nothing fits"),
        ("plan llama3-8b --gpus 1e9", "gpus is 1000000000: give a whole number from 1 to 1,000,000"),
        ("plan llama3-8b --seq 1e308", "--seq is 1e+308"),
        (f"plan llama3-8b --batch {'9' * 400}", "batch is 9999"),
        ("plan llama3-8b --tokens nan", "--tokens is nan: give a number from 1 to"),
        ("plan llama3-8b --tokens=-5", "--tokens is -5: give a number from 1 to"),
        ("plan layers=2,hidden=64,heads=4,vocab=9,seq=8,ffn=-256", "ffn is -256: give a whole number from 0"),
        ("plan layers=2,hidden=6.5,heads=4,vocab=9,seq=8", "hidden is 6.5: give a whole number from 1"),
        (f"plan layers={'9' * 5000},hidden=64,heads=4,vocab=9,seq=8", "layers is inf: give a whole number"),
        (f"plan llama3-8b --fixed pipe={'9' * 400}", "pipe is 9999"),
        ("plan llama3-8b --fixed pipe=-1", "pipe is -1: give a whole number"),
        ("plan llama3-8b --gpus 2.5", "--gpus is 2.5: give a whole number"),
        ("plan llama3-8b --gpus 1e8", "gpus is 100000000: give a whole number from 1 to 1,000,000"),
        ("plan layers=2,layers=3,hidden=64,heads=4,vocab=9,seq=8", "layers is in 'layers=2,layers=3,"),
        ("plan llama3-8b --fixed zero=1,zero=3", "zero is in 'zero=1,zero=3' twice"),
        ("plan llama3-8b --fixed expert=2", "expert is 2, and the model's experts are 0: give 1."),
        ("plan llama3-8b --device=--", "There is no device"),  # argparse makes an empty list of it
        ("plan llama3-8b --best -1", "--best is -1: give a whole number"),
        ("plan llama3-8b --best inf", "--best is inf: give a whole number"),
    ),
)
def test_what_cannot_be_ends_with_one_sentence(line, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_more_plans_than_anybody_waits_for_are_refused(capsys, monkeypatch):
    search = import_module("dtlib.planner.estimate")
    assert search.MOST_PLANS == 40_000
    monkeypatch.setattr(search, "MOST_PLANS", 1000)
    line = "plan layers=1e6,hidden=7207200,heads=720720,vocab=9,seq=65536,experts=720720 --gpus 720720"
    assert main(line.split()) == 2
    says = "720720 GPUs have more than 1,000 plans: fix some axes, such as tensor=8,pipe=4."
    assert (error := capsys.readouterr().err) and says in error and error.count("\n") == 1, error


def test_json_and_files_at_once(tmp_path, capsys):
    sizes, file = "layers=2,hidden=64,heads=4,vocab=256,seq=8", tmp_path / "x.dtlib.json"
    assert main(["plan", sizes, "--gpus=1", "--batch=1", "--json", f"--write={file}"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) and json.loads(file.read_text()) and str(file) in said.err


def test_a_pipe_is_no_file_to_write_or_read(tmp_path, capsys):
    os.mkfifo(pipe := tmp_path / "x.dtlib.json")
    sizes = "layers=2,hidden=64,heads=4,vocab=256,seq=8"
    assert main(["plan", sizes, "--gpus=1", "--batch=1", f"--write={pipe}"]) == 2
    assert "cannot be written (No such device or address): name another file" in capsys.readouterr().err
    assert main(["plan", str(pipe)]) == 2
    assert "is not a config of a model" in capsys.readouterr().err


def test_a_model_from_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}))
    assert model_of(str(path)).hidden == 64
    assert model_of(str(path), seq=16).seq == 16
    for text in ("[1]", "[" * 100_000, "no JSON"):
        path.write_text(text)
        refuses("is not a config of a model", lambda: model_of(str(path)), error=PlanError)
    path.unlink()
    os.mkfifo(path)
    refuses("is not a config of a model", lambda: model_of(str(path)), error=PlanError)
    for wrong in ([64], -1, 1.5, True, 10**400):
        with pytest.raises(PlanError, match="vocab is"):
            model_of({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": wrong, "n_positions": 32})
    for wrong in ("context=0", "micro_batch=0", "batch=8"):
        with pytest.raises(PlanError):
            fixed_of(wrong)
    assert fixed_of("zero=3, sequence_parallel=false") == {"zero": 3, "sequence_parallel": False}


def test_it_says_so_where_nothing_fits(capsys):
    assert main(["plan", "llama3-405b", "--gpus", "8", "--batch", "64"]) == 0
    said = capsys.readouterr().out
    assert "None of" in said and "Cut it over more GPUs" in said and "no: " in said


def test_in_a_notebook(capsys):
    from IPython.display import display  # noqa: F401, what the lab shows with

    from dtlib import lab

    found = lab.plan("llama3-8b", 16, batch=256, seq=4096, best=3, zero=1)
    assert len(found) == 3 and all(each.plan.zero == 1 for each in found)
    from dtlib.lab.planning import what_fits

    tried = plan_for("llama3-8b", 16, batch=256, seq=4096)[1]
    picture, first = what_fits.drawn(tried), next(each for each in tried if each.fits)
    assert "meshes fit" in capsys.readouterr().out
    bounds = f"{first.said(first.low)}–{first.said(first.high)} s"
    assert f">{bounds}<" in picture.svg and f"{bounds}, {first.memory.total / GIB:.0f}" in str(picture)
    tried = plan_for("llama3-70b", 16, batch=256, seq=4096)[1]
    large = what_fits.drawn([each for each in tried if not each.fits])
    assert " s<" not in large.svg and " GiB<" in large.svg, "a mesh that is too large has its GiB"


# Configs for dtlib train.


def test_what_dtlib_train_cannot_do_is_refused():
    plan = Plan(data=2, tensor=2, pipe=2, batch=32)
    with pytest.raises(PlanError, match="dtlib train divides layers, sequences and experts only of its own decoder"):
        configs.for_dtlib(LLAMA, plan)
    with pytest.raises(PlanError, match="dtlib train divides layers, sequences and experts only of its own decoder"):
        configs.for_dtlib(LLAMA, replace(plan, tensor=1, context=2))
    with pytest.raises(PlanError, match="dtlib train's pipelines support ZeRO stages 0, 1 and 2, not 3"):
        configs.for_dtlib(LLAMA, replace(plan, tensor=1, zero=3))


def test_our_own_config_is_one_that_initialize_reads():
    from dtlib.training import config

    plan = Plan(data=2, pipe=2, batch=32, micro_batch=4, recompute="full", zero=1)
    made = config.read(configs.for_dtlib(LLAMA, plan), ranks=2)
    assert (made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps) == (32, 4, 4)
    assert made.zero_optimization.stage == 1
    pipeline = made.pipeline
    assert (pipeline.stages, pipeline.schedule, pipeline.activation_checkpoint_interval) == (2, "1f1b", 1)


def test_what_is_written_is_what_was_planned(tmp_path, capsys):
    file = tmp_path / "x.dtlib.json"
    assert main(f"plan llama3-8b --gpus 16 --batch 256 --seq 4096 --write={file}".split()) == 0
    assert json.loads(file.read_text())["train_batch_size"] == 256
    assert "for dtlib" in capsys.readouterr().out
    assert estimate(LLAMA, Plan(data=8, batch=8, micro_batch=1), DEVICES["h100"]).plan.gpus == 8


# The chart: each of its inequalities by the planner's own formulas.


def test_the_charts_inequalities_are_the_planners():
    from dtlib.planner.wire import data_bytes, layer_bytes
    from dtlib.schedule import formulas

    model, operations, link = replace(LLAMA, layers=64, vocab=8, kv_heads=8), 400e12, 50e9
    plan = Plan(data=1024, zero=3, batch=1024)
    tokens = operations / link
    matrices = 6 * model.layers * (model.attention_parameters + model.expert_parameters)
    taken = data_bytes(model, replace(plan, scheme="mixed_adam")) / link
    assert matrices * tokens / operations == pytest.approx(taken, rel=0.02)  # n = F/B

    square = replace(model, ffn=0, kv_heads=0, gated=False, hidden=8192, heads=64)
    most = 1 + 4.5 * square.hidden * 300e9 / operations
    plan = Plan(tensor=32, batch=1)
    took = layer_bytes(square, plan)["tensor"] * 32 / 31 / 300e9 * (most - 1) / most  # as if on `most` ranks
    layer = 6 * square.seq * (square.attention_parameters + square.expert_parameters) / most / operations
    assert took == pytest.approx(layer, rel=0.01)

    assert formulas.bubble("one_f_one_b", 8, 4 * 7) == pytest.approx(0.2)

    context = 8
    local = model.kv_width / model.hidden * operations / link  # tokens of a rank
    ring = replace(model, seq=int(local * context))
    sent = layer_bytes(ring, Plan(context=context, batch=1))["context"] / 3 / (context - 1) / link
    assert sent == pytest.approx(4 * local * local * model.hidden / operations, rel=0.01)


def test_the_chart_is_drawn_and_its_page_is_that_of_today():
    from dtlib.lab.decision_chart import BRANCHES, SHORT_BRANCHES, chart
    from tools import decision_chart

    drawn = chart.drawn()
    assert decision_chart.PICTURE.read_text() == drawn.svg + "\n"
    page = decision_chart.PAGE.read_text()
    assert drawn.alt in page and all(branch[3] in page for branch in BRANCHES)
    assert len(BRANCHES) == 8 and "8 questions" in drawn.alt and "lesson 06" in str(drawn)
    short = chart.drawn(short=True)
    rules = " ".join(branch[1] for branch in SHORT_BRANCHES)
    assert "4 questions" in short.alt and set(re.findall(r"\b[A-Za-z]\b", rules)) <= set("PNpm"), "letters it explains"


def test_plans_whose_bands_overlap_tie():
    best, tried = plan_for("llama3-8b", 16, batch=256, seq=4096)
    places = [row[0] for row in report.best_rows(best)]
    tied = sum(each.low <= best[0].high for each in best)
    assert tied > 1 and places[:tied] == ["1="] * tied
    apart = [best[0], replace(best[1], low=2 * best[0].high, high=3 * best[0].high)]
    assert [row[0] for row in report.best_rows(apart)] == ["1", "2"]
    assert "tie" in report.summary(best, tried) and "tie" not in report.summary(apart, tried)
