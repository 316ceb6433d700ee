"""The figures of lesson 06, and what its cells take from ``lab``: the loop that trains, and published tables."""

import torch

from dtlib import lab
from dtlib.comm import solo
from dtlib.lab import digits
from dtlib.lessons.l06 import figures


def rows_of(text):
    return [line.split() for line in text.splitlines()]


def test_units_are_drawn_in_bytes_that_are_alive(capsys):
    events = []
    for event in (("forward",), ("gathered", "0"), ("gathered", "2"), ("freed", "0"), ("freed", "2"), ("end",)):
        figures.note(events, *event)
    figures.units(events, {"0": 100, "2": 60}, itemsize=8, ranks=4)
    shards = 160 * 8 // 4
    alive = [row[-1] for row in rows_of(capsys.readouterr().out)[-6:]]
    assert alive == [f"{shards + 8 * whole:,}" for whole in (0, 100, 160, 60, 0, 0)]


def test_bars_have_their_totals(capsys):
    groups = {"stage 1": {"parameters": 15, "gradients": 15, "optimizer_states": 1.4}}
    figures.bars(groups, "GB", {"stage 1": 31.4}, "a title")
    text = rows_of(capsys.readouterr().out)
    assert ["stage", "1", "15.0", "15.0", "1.4", "0.0", "31.4"] in text and ["published", "31.4"] in text


def test_a_bar_ends_at_the_peak(capsys):
    figures.bars({"stage 1": {"parameters": 10, "padding": 1, "peak": 25}})
    assert ["stage", "1", "10", "0", "0", "15", "25"] in rows_of(capsys.readouterr().out)


def test_the_loop_of_the_lessons_trains_each_rank_on_its_slice():
    (x, y), _ = digits.load(torch.float64)
    model, calls = digits.net(16, torch.float64, layers=2), []
    assert [layer.out_features for layer in model if isinstance(layer, torch.nn.Linear)] == [16, 16, 10]
    losses = digits.train(model, solo(1, 3), lambda: calls.append(model[0].weight.grad.clone()), steps=2)
    assert len(losses) == len(calls) == 2
    expected = torch.nn.functional.cross_entropy(model(x[1:96:3]), y[1:96:3])
    (gradient,) = torch.autograd.grad(expected, model[0].weight)
    assert (gradient - calls[0]).abs().max() < 1e-12


def test_published_tables_are_found_from_anywhere_in_the_course(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [row["GB"] for row in lab.published("zero_figure1_7p5B_Nd64.csv")] == ["120", "31.4", "16.6", "1.9"]
