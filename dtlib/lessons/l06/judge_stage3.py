"""Lesson 06: checks of a layer that is gathered on demand, and of a large model that must fit into memory."""

from dtlib.lab.checks.answer_memory import Snapshot, nbytes
from dtlib.lab.checks.equality import MARGIN, NUMBER, factors, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l06.judge_adam import judge_errors
from dtlib.lessons.l06.observe_adam import attempt, length_of
from dtlib.theory.zero import GB, GIB, STAGES, fewest_ranks, zero_bytes, zero_wire_elements

LAYERS = {"even": (7, 96), "uneven": (4, 115)}  # 768 parameters divide by 2, 3 and 4; 575 by none of them
CALLS = 3
ALLOWANCE = 128  # bytes allowed for padding and shapes; a whole bias would be larger
NO_OUTPUT = ("__call__ returns the output: a tensor.",
             "return linear(x, weight, bias), with the gathered weight and bias.")
BIAS = "The result has no bias. Where is it in the flat tensor?", "The bias follows the weight in the flat tensor."
EACH = ("Is fit a dict of 3 numbers?", 'For example fit = {"stage": 1, "ranks": 4, "gigabytes": 12.5}.')
WHOLE = ("Both are whole numbers.", "stage is 0, 1, 2 or 3; ranks is the number of ranks.")
PARAMETERS, BUDGET = 7_500_000_000, 16 * GB


# build: OnDemand(comm, layer), which is called with x


def make_layer(kind: str):
    """Return the layer, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Linear(*LAYERS[kind], dtype=torch.float64)  # float64 values that do not fit float32


def make_input(kind: str, rank: int, call: int):
    """Return samples, different on every rank."""
    import torch

    generator = torch.Generator().manual_seed(100 * call + rank + 1)
    return torch.randn(3 + rank, LAYERS[kind][0], dtype=torch.float64, generator=generator)


def observe_on_demand(cls, comm):
    """Return for each layer outputs, bytes sent, and bytes stored before the first call and after each."""
    return [attempt(lambda kind=kind: _call(cls, comm, kind), kind) for kind in LAYERS]


def _call(cls, comm, kind: str) -> dict:
    import torch

    from dtlib.comm.watch.recorder import recording

    seen = {"kind": kind, "out": [], "sent": [], "held": []}
    with Snapshot(cls) as before:
        layer = cls(comm, make_layer(kind))
        seen["held"].append(nbytes(before.new(of=[layer])))
        for call in range(CALLS):
            x = make_input(kind, comm.rank, call)
            with torch.no_grad(), recording() as events:
                out = layer(x)
            seen["out"].append(out.tolist() if isinstance(out, torch.Tensor) else f"{out!r:.60}")
            seen["sent"].append(sum(event.bytes for event in events if event.kind == "operation"))
            seen["uncounted"] = any(event.algorithm == "mpi4py" for event in events)
            del x, out
            seen["held"].append(nbytes(before.new(of=[layer])))
    return seen


def judge_on_demand(observations) -> None:
    """Check outputs, memory of one shard between calls, and one gathering in each call."""
    for cases in zip(*observations, strict=True):
        judge_errors(cases)
        for rank, case in enumerate(cases):
            _judge_output(case, rank, len(cases))
    if len(observations) == 1:
        return
    for cases in zip(*observations, strict=True):
        for rank, case in enumerate(cases):
            _judge_memory(case, rank, len(cases))
            _judge_gathering(case, rank, len(cases))


def _judge_output(case, rank: int, ranks: int) -> None:
    import torch

    kind, layer = case["kind"], make_layer(case["kind"])
    count = sum(parameter.numel() for parameter in layer.parameters())
    for call, out in enumerate(case["out"]):
        x = make_input(kind, rank, call)
        expected = layer(x).detach()
        what = f"the result of nn.Linear{LAYERS[kind]} for {len(x)} samples, in call {call + 1}"
        wrong = rows(rank, what)
        wrong("type", isinstance(out, str), out, *NO_OUTPUT)
        got = torch.tensor(out, dtype=torch.float64)
        if same(got, expected):
            continue
        if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-2, atol=1e-2):
            raise Wrong("rounded", rank, f"{what}, in {layer.weight.dtype}",
                        "nearly the right values, but parameters were rounded",
                        "In which type does a rank store its shard, and in which type does it send it?",
                        "Use the layer's type: no .float(), no .half(), and dtype=self.own.dtype for new memory.")
        wrong("second-call", call, "something else, after a correct first call",
              "What does the first call change or free that the second call needs?", "Do not change this rank's shard.")
        wrong("padding", kind == "uneven", "something else, but right if sizes divide by the number of ranks",
              f"The layer has {count} parameters, not divisible by {ranks}. Where is the padding? Do you remove it?",
              "The padding is at the end, after weight and bias. Remove it after all_gather.")
        if got.shape == expected.shape:
            _explain_output(got, expected, x, layer, rank, what)
        wrong("other-values", True, f"something of shape {tuple(got.shape)}",
              "Do you join the shards in rank order? Do you cut out weight and bias in the original order?",
              "torch.nn.functional.linear(x, weight, bias). The weight has the shape (outputs, inputs).")


def _explain_output(got, expected, x, layer, rank: int, what: str) -> None:
    """Recognise the mistake in a wrong output of the right shape."""
    import torch

    weight, bias = layer.weight.detach(), layer.bias.detach()
    wrong = rows(rank, what)
    wrong("no-bias", same(got + bias, expected), "the result without the bias", *BIAS)
    if found := factors(got, expected - bias, bias):
        told = f"{found[0]:.3g} times x @ weight.T, and {found[1]:.3g} times the bias"
        wrong("other-sum", True, told, "How often do you add each of the two terms?", *BIAS)
    front, rest = torch.cat([weight.flatten(), bias]).split([len(bias), weight.numel()])
    for told, w, b in (
        ("the result with a bias from the front of the flat tensor", rest.view_as(weight), front),
        ("the result with a weight of shape (inputs, outputs)", weight.reshape(weight.T.shape).T, bias),
    ):
        wrong("cut-otherwise", same(got, x @ w.T + b), told,
              "Which is first in the flat tensor, weight or bias? What is the weight's shape?",
              "The weight is whole[:n].view(self.shape). The bias follows.")


def _judge_memory(case, rank: int, ranks: int) -> None:
    count = _count(case["kind"])
    shard = length_of(count, ranks) * NUMBER
    at_rest, *after = case["held"]
    wrong = rows(rank)
    wrong("whole-at-rest", at_rest > shard + ALLOWANCE,
          f"{shard} bytes in use before the first call: this rank's shard of {count} parameters", f"{at_rest} bytes",
          "Which tensor, array or list still has the length of the layer? A view keeps its whole storage, and a "
          "tensor with a grad_fn keeps the tensors that it was computed from.",
          "Keep detach().clone() of this rank's shard, and only the shapes of the layer.")
    wrong("not-freed", max(after) > shard + ALLOWANCE, f"{shard} bytes in use after a call: this rank's shard",
          f"{max(after)} bytes", "After the call, what still refers to x or to the gathered tensor?",
          "Gather into a local variable: its memory is freed when __call__ returns.")


def _judge_gathering(case, rank: int, ranks: int) -> None:
    wanted = (ranks - 1) * length_of(_count(case["kind"]), ranks) * NUMBER
    for call, sent in enumerate(case["sent"]):
        wrong = rows(rank, f"{wanted} bytes sent in call {call + 1}: each shard to the other ranks")
        wrong("too-many-bytes", sent > wanted + MARGIN, f"{sent} bytes",
              f"The values are right, but you send {sent / max(1, wanted):.1f} times the bytes. How often do you "
              "gather?", "One comm.all_gather(whole, own) in each call is enough, for weight and bias together.")
        wrong("nothing-gathered", sent < wanted / 2 and not case.get("uncounted"), f"{sent} bytes",
              "Each call needs the shards of all ranks. From where does this rank get the others?",
              "Call comm.all_gather in __call__, on every rank.")


def _count(kind: str) -> int:
    inputs, outputs = LAYERS[kind]
    return (inputs + 1) * outputs


# fit-it: fit = {"stage": ..., "ranks": ..., "gigabytes": ...}


def observe_fit(fit, comm):
    """Return the three numbers, or text for a value that is no number."""
    return {name: _number(fit, name) for name in ("stage", "ranks", "gigabytes")}


def _number(fit, name: str):
    try:
        value = float(fit[name])
        return int(value) if value.is_integer() and name != "gigabytes" else value
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return f"{fit!r:.80}"


def held_by(ranks: int, stage: int, scheme="mixed_adam") -> float:
    """Return the bytes of model states on a rank, without padding."""
    held = zero_bytes(PARAMETERS, ranks, stage, scheme)
    return sum(held.values()) - held["padding"]


def judge_fit(observations) -> str:
    """Check that the model fits, on the smallest number of ranks of any stage; return the score."""
    for rank, fit in enumerate(observations):
        stage, ranks, gigabytes = fit["stage"], fit["ranks"], fit["gigabytes"]
        if any(isinstance(value, str) for value in fit.values()):
            got = next(value for value in fit.values() if isinstance(value, str))
            raise Wrong("type", rank, "numbers for stage, ranks and gigabytes", got, *EACH)
        if stage not in STAGES or not isinstance(ranks, int) or ranks < 1:
            got = f"stage {stage} on {ranks} ranks"
            raise Wrong("type", rank, "a stage from 0 to 3, on 1 rank or more", got, *WHOLE)
        _judge_place(rank, stage, ranks)
        _judge_gigabytes(rank, stage, ranks, gigabytes)
    sent = {n: 2 * zero_wire_elements(PARAMETERS, n, s) / GB for s, n in ((2, _fewest(2)), (3, ranks))}
    return (
        f"{ranks} ranks at stage 3 hold {gigabytes:.4g} GB each and send {sent[ranks]:.4g} GB in a step; stage 2 needs "
        f"{_fewest(2)} ranks, and sends {sent[_fewest(2)]:.4g} GB."
    )


def _fewest(stage: int) -> int | None:
    return fewest_ranks(PARAMETERS, BUDGET, stage)


def _judge_place(rank: int, stage: int, ranks: int) -> None:
    held, best = held_by(ranks, stage), _fewest(3)
    got = f"stage {stage} on {ranks} ranks: {held / GB:.2f} GB"
    expected = f"at most {BUDGET / GB:.0f} GB of model states per rank"
    if _fewest(stage) is None or ranks < _fewest(stage):
        wrong = rows(rank, expected)
        wrong("nothing-sharded", stage == 0, got, "Data parallelism stores all states on every rank.",
              "Which states does each stage shard? How many bytes per parameter?")
        wrong("parameters-whole", stage < 3 and 16 * PARAMETERS / ranks <= 16 * GIB and ranks <= 2 * best, got,
              f"Not all states are divided by the number of ranks. Which states does stage {stage} not shard?",
              "Stages 1 and 2 do not shard parameters (2 bytes each), and stage 1 does not shard gradients (2 bytes).")
        wrong("stage-1", stage == 1, got, "More ranks do not help. How many bytes are not sharded?",
              "Stage 1 leaves 4 bytes per parameter: 30 GB.")
        wrong("gibibytes", ranks == fewest_ranks(PARAMETERS, 16 * GIB, stage), f"{got}, which is {held / GIB:.2f} GiB",
              "It would fit into 16 GiB. Does a gigabyte have 10**9 bytes or 2**30?",
              "A GB has 10**9 bytes here, as in the paper: 16 GB are 16 * 10**9.")
        wrong("too-few", True, got,
              "It does not fit. How many bytes per parameter does this stage need with this number of ranks?",
              "Stage 2: 2 + 14/N bytes per parameter; stage 3: 16/N.")
    wrong = rows(rank, "the fewest ranks with any stage")
    wrong("stage-2", stage != 3, f"{got}, which fits, but uses more ranks than necessary",
          "It fits. Which stage stores the fewest bytes on a rank?",
          "Stage 3 also shards the parameters: 16/N bytes each.")
    wrong("too-many", ranks > best, f"{got}, which fits, but fewer ranks also fit",
          "Try one rank less.", "16 bytes per parameter (2 + 2 + 12), divided by N. What is the smallest N?")


def _judge_gigabytes(rank: int, stage: int, ranks: int, gigabytes: float) -> None:
    held = held_by(ranks, stage)
    expected = f"{held / GB:.4g} GB on a rank"

    def near(count):
        return abs(gigabytes - count) <= 0.004 * abs(count)

    if near(held / GB):
        return
    others = (
        (held / GIB, "gibibytes", "This is the number in GiB, units of 2**30 bytes.", "Divide by 10**9."),
        (held, "bytes", "This is the number of bytes.", "Divide by 10**9."),
        (held_by(ranks, stage, "mixed_adam_float32_gradients") / GB, "eighteen-bytes",
         "These are 18 bytes per parameter. Are gradients in float32?", "They have 2 bytes here: 16 in all."),
        (PARAMETERS * 16 / GB, "not-divided", "This is the memory of all ranks together.", "Divide by the ranks."),
    )
    wrong = rows(rank, expected)
    for count, mistake, *hints in others:
        wrong(mistake, near(count), f"{gigabytes:g}", *hints)
    wrong("gigabytes", True, f"{gigabytes:g}", "Do you count parameters, gradients, master weights and Adam's moments?",
          "16 bytes per parameter, divided by the ranks, in units of 10**9 bytes.")


EXERCISES = {
    "gather-on-demand": Exercise("OnDemand", observe_on_demand, judge_on_demand, any_size=True),
    "fit-it": Exercise("fit", observe_fit, judge_fit),
}
