"""Lesson 06: check of Adam with sharded states, by values, bytes sent and memory."""

from dtlib.lab.checks.equality import MARGIN, NUMBER, factors, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l06 import observe_adam as observed
from dtlib.lessons.l06.observe_adam import STEPS, flat_of, in_one_process, length_of, make_net, own_shard


def judge_adam(observations) -> None:
    """Check that parameters equal those of one process, and that bytes sent and stored states are minimal."""
    for cases in zip(*observations, strict=True):
        judge_errors(cases)
        _judge_steps(cases)
    if len(observations) == 1:
        return
    for judge_cost in (_judge_held, _judge_sent):  # an answer with all states may send more bytes because of that
        for cases in zip(*observations, strict=True):
            judge_cost(cases)


def judge_errors(cases) -> None:
    """Raise ``Wrong`` for the first error of any rank; errors count before timeouts."""
    errors = [(case["waited"], rank, case["error"]) for rank, case in enumerate(cases) if "error" in case]
    if errors:
        _, rank, got = min(errors)
        raise Wrong("only-divides", rank, f"no error if sizes do not divide by {len(cases)}", got,
                    "The code works if sizes divide by the number of ranks. What if they do not?",
                    "Each shard has ceil(P / N) elements, -(-P // N) in Python. Padding fills the rest at the end.")


def _judge_steps(cases) -> None:
    import torch

    ranks, kind = len(cases), cases[0]["kind"]
    start = flat_of(make_net(kind).parameters())
    count = len(start)
    expected = in_one_process(kind, ranks)[0]
    for step in range(STEPS):
        after = [torch.tensor(case["after"][step], dtype=torch.float64) for case in cases]
        off = [rank for rank in range(ranks) if not same(after[rank], expected[step])]
        if not off:
            continue
        rank = off[0]
        what = f"the {count} parameters of one process after step {step + 1}"
        got = f"{(~torch.isclose(after[rank], expected[step], rtol=1e-8, atol=1e-10)).sum()} parameters differ"
        _judge_optimizer(after, rank, kind, step, what)
        wrong = rows(rank, what)
        wrong("second-step", step, f"{got}, after a correct first step",
              "Which state is lost between two steps, or remains from the step before? Keep Adam's running means.",
              "Create the optimizer once, in __init__, and set its gradient in each step.")
        wrong("not-copied-back", all(torch.equal(values, start) for values in after), "all parameters are unchanged",
              "You updated some memory, but not the memory that the model uses. Where are the model's parameters?",
              "Let parameter.data be a view of the flat memory, or copy the new values into parameter.data.")
        own = [same(own_shard(after[r], r, ranks), own_shard(expected[0], r, ranks)) for r in range(ranks)]
        wrong("not-gathered", all(own), f"{got}: this rank's shard is right, the other shards are old",
              "Each rank has updated its shard. How do the other ranks get the new values?",
              "comm.all_gather(flat, own) after the update.")
        _judge_gradients(after, rank, kind, what, got)
        if all(torch.allclose(values, expected[0], rtol=5e-3, atol=1e-4) for values in after):
            raise Wrong("rounded", rank, f"{what}, in float64, the type of the parameters",
                        f"{got}, by very little, because of rounding",
                        "In which type do you send gradients, and in which type do you store them?",
                        "torch.empty_like(self.own) has the type of the parameters; no .float(), no .half().")
        way = factors(after[rank] - start, expected[0] - start)
        if way:
            wrong("other-rate", True, f"{got}: they move {way[0]:.3g} times as far, in the right direction",
                  "By what do you multiply or divide the learning rate?", "torch.optim.AdamW([self.own], **settings)")
        if kind == "uneven":
            _judge_padding(after, expected[0], start, rank, what, got)
        wrong("other-values", True, got,
              "Do gradients and parameters have the same order? How often does Adam step? Which tensor do you gather?",
              "Store parameters and gradients in flat memory in the same order, call step once, gather the new values.")


def _judge_optimizer(after, rank: int, kind: str, step: int, what: str) -> None:
    """Recognise the parameters of another optimizer, or of other settings."""

    def are_of(**other):
        return all(same(values, in_one_process(kind, len(after), **other)[0][step]) for values in after)

    wrong = rows(rank, what)
    wrong("other-optimizer", are_of(optimizer="Adam"), "the result of torch.optim.Adam",
          "Both optimizers have a weight_decay, and use it differently. Which one does the exercise ask for?",
          "torch.optim.AdamW([self.own], **settings)")
    keys = tuple(observed.SETTINGS)
    for but in (*((key,) for key in keys), tuple(key for key in keys if key != "lr"), keys):
        wrong("settings-lost", are_of(but=but), f"those with the default {', '.join(but)}",
              "Do you pass all settings to the optimizer?", "torch.optim.AdamW([self.own], **settings)")

    for added in ({"amsgrad": True}, {"maximize": True}):
        wrong("settings-added", are_of(**added), f"those with {added}",
              "Which settings do you pass that the caller did not?", "torch.optim.AdamW([self.own], **settings)")


def _judge_gradients(after, rank: int, kind: str, what: str, got: str) -> None:
    """Recognise the parameters after a step with another gradient."""
    ranks = len(after)

    def on_all_ranks(factor):
        other = in_one_process(kind, ranks, factor, steps=1)[0][0]
        return all(same(values, other) for values in after)

    wrong = rows(rank, what)
    wrong("not-divided", ranks > 1 and on_all_ranks(ranks), f"{got}: the gradient is {ranks} times as large",
          "Adam hides most of a wrong scale. This is the sum over ranks. Which operation computes the mean?",
          'Average: op=dist.ReduceOp.AVG, or divide by comm.size once.')
    wrong("no-gradient", on_all_ranks(0), f"{got}: as after a step whose gradient is zero",
          "Only weight decay changes the parameters. Which gradients exist when step() starts?",
          "backward() has set parameter.grad: read it in step(), and clear nothing before.")
    wrong("divided-twice", ranks > 1 and on_all_ranks(1 / ranks),
          f"{got}: the gradient is 1/{ranks} of what it should be",
          "op=dist.ReduceOp.AVG divides already. Which line divides again?", "Use only AVG, or add and divide once.")
    alone = [in_one_process(kind, ranks, only=r, steps=1)[0][0] for r in range(ranks)]
    wrong("not-averaged", all(same(own_shard(after[r], r, ranks), own_shard(alone[r], r, ranks)) for r in range(ranks)),
          f"{got}: the gradient of only one rank updates each shard",
          "From which samples is the gradient of this rank's shard computed?",
          "comm.reduce_scatter(own_gradient, flat_gradients, op=\"mean\") gives the mean of this rank's shard.")


def _judge_padding(after, expected, start, rank: int, what: str, got: str) -> None:
    import torch

    ranks = len(after)
    tail = len(expected) % ranks
    wrong = rows(rank, what)
    wrong("tail-forgotten", tail and all(same(values[:-tail], expected[:-tail]) for values in after) and torch.equal(
          after[rank][-tail:], start[-tail:] ), f"the last {tail} are unchanged",
          f"{len(expected)} parameters do not divide by {ranks}. Which rank owns the last ones?",
          "Round the length of a shard up, -(-P // N) in Python, and fill the end with zeros.")
    wrong("padding", True, f"{got}, but right if sizes divide by the number of ranks",
          f"{len(expected)} parameters do not divide by {ranks}. Where is the padding, and do you remove it again?",
          "The padding is at the end, after the last parameter, in values and in gradients. Remove it again.")


def _judge_sent(cases) -> None:
    ranks, count = len(cases), len(cases[0]["after"][0])
    wanted = 2 * (ranks - 1) * length_of(count, ranks) * NUMBER
    for rank, case in enumerate(cases):
        if max(case["sent"]) > wanted + MARGIN:
            raise Wrong(
                "too-many-bytes", rank, f"{wanted} bytes sent in a step: gradients to their owners, new values back",
                f"{max(case['sent'])} bytes",
                "The values are right. Which rank needs the mean gradient of a shard, and which has its new values?",
                "comm.reduce_scatter for gradients, comm.all_gather for values: each sends half of an all_reduce.")


def _judge_held(cases) -> None:
    """Check memory: all parameters and three shards.

    A fourth shard is allowed for answers that do not update the parameters in place.
    """
    ranks, count = len(cases), len(cases[0]["after"][0])
    shard = length_of(count, ranks) * NUMBER
    whole = ranks * shard
    for rank, case in enumerate(cases):
        # Two shards of moments, one of the gradient, and one of parameters if they are not updated in place.
        if case["held"] <= whole + 4 * shard + MARGIN:
            continue
        expected = f"{whole} bytes of parameters; for this rank's shard {2 * shard} of states, {shard} of gradients"
        wrong = rows(rank, expected)
        wrong("whole-states", case["states"] > 2 * shard + MARGIN, f"{case['states']} bytes of states",
              "The values are right, but memory is as before ZeRO. For how many parameters does Adam store moments?",
              "Give torch.optim.AdamW one nn.Parameter: this rank's shard of the flat values.")
        wrong("parameters-twice", case["copies"] > whole + shard + MARGIN,
              f"{case['copies']} bytes with the values of parameters",
              "The model stores its parameters. Which other object stores all of them?",
              "Let each parameter.data be a view of the flat tensor: parameter.data = view.view_as(parameter).")
        wrong("old-parameters-kept", case["old"] > shard + MARGIN,
              f"{case['old']} bytes of parameters with their first values",
              "You copied the first values into the flat tensor. What still refers to the old memory?",
              "Store the parameters themselves, not a list of parameter.data, parameter.detach() or clones.")
        wrong("zeroed-not-freed", case["zeros"] > shard + MARGIN, f"{case['zeros']} bytes of zeros in one piece",
              "zero_() writes zeros, and does not free memory. Which tensor do you need only during step()?",
              "Create the flat gradients in each step, in a local variable: it is freed when the method returns.")
        wrong("gradients-kept", True, f"{case['held']} bytes in all",
              "Which tensor or array, as long as all parameters, still exists after step()?",
              "You need the flat gradients only during step(). A local variable is freed when step() returns.")


EXERCISES = {"sharded-adam": Exercise("ShardedAdam", observed.observe_adam, judge_adam, any_size=True)}
