"""Lesson 08: checks of layers that are split over ranks, by outputs, gradients, bytes sent and memory."""

from dtlib.lab.checks.equality import NUMBER, SPARE, as_tensor, factors, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l08.observe_layers import PASSES, expected, make_input, observe_mlp, observe_row

FLAGS = 64  # bytes allowed for small additional messages


def judge_row(observations) -> None:
    """Check output and gradients of the layer, with one all_reduce in the forward pass and none backward."""
    _judge(observations, "row")


def judge_mlp(observations) -> None:
    """Check the perceptron in the same way, with one more all_reduce in the backward pass."""
    _judge(observations, "mlp")


def _judge(observations, kind: str) -> None:
    ranks = len(observations)
    for rank, seen in enumerate(observations):
        if "type" in seen:
            raise Wrong("type", rank, "the output: a tensor", seen["type"], "forward returns the output.",
                        "One tensor, of the shape of the whole layer's output, and nothing beside it.")
    for step in range(PASSES):
        ways = expected(kind, ranks, step)
        for judge in (_judge_output, _judge_input_gradient):
            for rank, seen in enumerate(observations):
                judge(seen["passes"][step], ways, rank, ranks, step)
        for rank, seen in enumerate(observations):
            _judge_parameters(seen["passes"][step], ways, rank, ranks)
    if ranks == 1:
        return
    for rank, seen in enumerate(observations):
        _judge_held(seen["held"], ways["parameters"][rank], rank)
        wrong = rows(rank)
        if kind == "mlp" and seen["shared"]:
            wrong("shared-memory", True, "parameters with memory of their own", f"{seen['shared'][0]} has the layer's",
                  "detach() gives a view: whoever trains this block would change the layer that it was made from.",
                  "nn.Parameter(whole.detach().clone()).")
        for step, one in enumerate(seen["passes"]):
            x, out = make_input(kind, step)
            counts = out.numel(), x.numel() if kind == "mlp" else 0
            _judge_sent(one["sent"], counts, rank, ranks)
            # A gather of reduced shards needs fewer bytes.
            wrong("summands-gathered", one.get("gathered", 0) >= out.nbytes,
                  "a sum over ranks, made on the way: one all_reduce", f"all_gather, of {one.get('gathered')} bytes",
                  "With 3 ranks it costs the same. What does each rank send and hold with 64?",
                  "reduce_from_ranks(y, comm): the ring sends at most twice y, however many ranks there are.")


def _judge_output(one, ways, rank: int, ranks: int, step: int) -> None:
    out, bias, summand = ways["out"], ways["bias"], ways["summand"][rank]
    got = as_tensor(one["out"])
    what = f"the output of the whole layers, of shape {tuple(out.shape)}"
    if same(got, out):
        if not same(as_tensor(one["quiet"]), out):
            raise Wrong("no-grad", rank, f"{what}, under torch.no_grad() too", "something else",
                        "Is there a step that only happens where gradients are wanted?")
        return
    wrong = rows(rank, what)
    wrong("second-pass", step, "something else, after a first pass that was right",
          "What did the first pass change? And does it work for any number of dimensions before the last?")
    wrong("not-reduced", same(got, summand) or same(got, summand + bias), "the summand of this rank's features",
          "Each rank has multiplied its features alone. Who adds up?",
          "reduce_from_ranks(y, comm), Megatron-LM's g, gives every rank the sum.")
    wrong("bias-once-a-rank", same(got, out + (ranks - 1) * bias), f"that, with the bias {ranks} times",
          "The weight is cut, the bias is not. How often is it in the sum?", "Add the bias after the sum.")
    wrong("no-bias", same(got, out - bias), "that without the bias",
          "A linear layer has a weight and a bias.", "Add the bias once, after the sum over ranks.")
    wrong("averaged", same(got, (out - bias) / ranks + bias) or same(got, out / ranks), "a mean over ranks",
          "Rows of a product are added: is it a sum, or a mean?",
          'The op is "sum", which is what all_reduce does if it is not told otherwise.')
    wrong("summed-twice", same(got, bias + ranks * (out - bias)), f"{ranks} times the sum, + bias",
          "How often are the summands added up?", "One reduce_from_ranks: each rank has the sum then.")
    for name, other in ways["activations"].items():
        wrong("other-activation", same(got, other), f"that with {name}",
              "What stands between the two products, and what behind them?",
              "linear1 with its bias, torch.nn.functional.gelu without options, linear2, the sum, its bias.")
    wrong("rounded", got.shape == out.shape and bool((got - out).abs().max() < 1e-3 * out.abs().max()),
          "nearly that: it was rounded", "In which type are shards kept, and in which do they compute?",
          "Keep the type of the layer: no .float(), and no torch.empty without dtype.")
    if found := factors(got, out - bias, bias) if got.shape == out.shape else None:
        wrong("other-sum", True, f"{found[0]:.3g} times the products, and {found[1]:.3g} times the bias",
              "How often does each of the two count?", "The sum over ranks of the products, and then the bias, once.")
    wrong("other-values", True, f"others, of shape {tuple(got.shape)}",
          "Rank r has consecutive features, slice r of them. Do both weights use the same, with one sum, at the end?",
          "torch keeps a weight as (outputs, inputs): columns of A are its rows.")


def _judge_input_gradient(one, ways, rank: int, ranks: int, step: int) -> None:
    right, summand = ways["x"][rank], ways["x_summand"][rank]
    what = "the gradient of this rank's input"
    wrong = rows(rank, what)
    wrong("no-gradient", one["x"] is None, "none",
          "Is something detached on the way, or computed under no_grad?", "reduce_from_ranks is known to autograd.")
    got = as_tensor(one["x"])
    if same(got, right):
        return
    # If the gradient of the first weight is right, the second sum comes after it in the backward pass, in f.
    weight, of_weight = next(iter(ways["parameters"][rank].values()))
    weight_is_right = any(
        same(as_tensor(g), of_weight) for p, g in one["parameters"] if g is not None and same(as_tensor(p), weight)
    )
    twice = [ranks * right] * weight_is_right + [sum(late) for late in zip(*ways["x_late"], strict=True)]
    wrong("f-twice", any(same(got, added_up) for added_up in twice),
          "what is added up over the ranks on its way back, and then once more",
          "How often does backward add up over the ranks between the output and x?",
          "copy_to_ranks, f, once, before the first product; reduce_from_ranks, g, once, after the second.")
    if same(got, ranks * right):
        raise _reduces_too(rank, what, ranks)
    wrong("f-missing", same(got, summand), "the gradient through this rank's hidden features alone",
          "All ranks used the same input. Whose gradients belong to it?",
          "copy_to_ranks(x, comm), Megatron-LM's f: x as it is, and backward an all_reduce of its gradient.")
    wrong("gradient-averaged", same(got, right / ranks) or same(got, summand / ranks), f"1/{ranks} of it",
          "Data parallelism takes the mean over ranks, as each has other samples. Here all have the same samples.",
          "The gradients of all ranks are added up; nothing divides.")
    wrong("gradients-mixed", len(ways["parameters"][rank]) == 2 and same(got, sum(ways["x"])),
          "those of all ranks' inputs, added up",
          "Each rank has other features of the input: do their gradients belong together?",
          "f, copy_to_ranks, is for an input that all ranks share. Here g alone is needed.")
    wrong("f-late", any(same(got, late) for late in ways["x_late"][rank]), "what f gives behind the first product",
          "f stands where all ranks have the same: what do they have behind the first product?",
          "linear(copy_to_ranks(x, comm), self.weight1, self.bias1)")
    wrong("other-gradient", True, "something else", "What does backward send, and in which order?",
          "f: forward nothing, backward all_reduce. g: forward all_reduce, backward nothing.")


def _reduces_too(rank: int, what: str, ranks: int) -> Wrong:
    return Wrong(
        "g-reduces-too", rank, what, f"{ranks} times as much",
        "The output is the same on all ranks, and so is its gradient: what happens if all ranks' are added up?",
        "The backward pass of the sum gives each summand the gradient as it is: reduce_from_ranks does that.",
    )


def _judge_parameters(one, ways, rank: int, ranks: int) -> None:
    for name, (value, right) in ways["parameters"][rank].items():
        gradient = _gradient_of(
            one["parameters"], value, name, rank, [shards[name][0] for shards in ways["parameters"]]
        )
        what = f"the gradient of {name}"
        wrong = rows(rank, what)
        wrong("no-gradient", gradient is None, "none",
              f"Does this rank compute with {name}, and does autograd know it?",
              "What a rank has, it uses: a bias that one rank alone adds would drift apart from the others'.")
        if same(gradient, right):
            continue
        wrong("gradient-negative", same(gradient, -right), "the same with the other sign",
              "How often is it used, and with which sign?", "Output: linear(x, self.weight), added up, + self.bias.")
        wrong("gradient-zero", not gradient.any(), "zeros", f"Is {name} used on this rank too, or multiplied by 0?",
              "What a rank has, it uses: all ranks compute with it alike.")
        if same(gradient, ranks * right) and "bias" not in name:
            raise _reduces_too(rank, what, ranks)
        wrong("gradient-scaled", same(gradient, ranks * right) or same(gradient, right / ranks),
              f"{ranks} times as much, or 1/{ranks} of it", "Nothing is added up over ranks or divided by them for it.",
              "The bias is added once, after the sum, on every rank alike.")
        everyones = sum(shards[name][1] for shards in ways["parameters"])
        wrong("shards-reduced", same(gradient, everyones) or same(gradient, everyones / ranks),
              "that of all ranks' shards together",
              "Ranks have different features: do their gradients belong together?",
              "A shard's gradient is complete where it is: nothing travels for it.")
        wrong("other-gradient", True, "something else",
              "The output is right: on how many ways does it depend on this parameter, and with which factors?",
              "Each shard is used once, in this rank's product; a bias once, after the sum, on every rank alike.")


def _gradient_of(parameters, value, name: str, rank: int, of_all_ranks):
    """Return the gradient of the parameter with these values, under any name, also if stored transposed."""
    for found, gradient in parameters:
        found = as_tensor(found)
        for turned in (lambda tensor: tensor, lambda tensor: tensor.t()):
            if found.dim() == value.dim() and same(turned(found), value):
                return None if gradient is None else turned(as_tensor(gradient))
    shapes = ", ".join(f"{tuple(as_tensor(found).shape)}" for found, _ in parameters) or "none"
    expected = f"{name}, a parameter of shape {tuple(value.shape)}: this rank's features"
    wrong = rows(rank, expected)
    wrong("other-shard", any(same(as_tensor(found), other) for found, _ in parameters for other in of_all_ranks),
          "the shard of another rank", "Rank r has shard r, in rank order.")
    if any(as_tensor(found).shape == value.shape for found, _ in parameters):
        hints = (
            "Rank r has consecutive features: slice r of them, and not every N-th.",
            "whole.chunk(comm.size, dim)[comm.rank]",
        )
        if value.dim() == 1 and "first" not in name:
            hints = (
                "Right outputs can hide it: a bias that is divided, or zero on some ranks, is trained in another way.",
                "Each rank keeps the whole layer's bias as it is, and adds it once, after the sum.",
            )
        raise Wrong("shard-values", rank, f"{expected}, as in the whole layer", "one of that shape, with other values",
                    *hints)
    wrong("no-shard", True, f"parameters of shapes {shapes}", "What does this rank keep, and what is trained?",
          "self.weight = nn.Parameter(shard.detach().clone()), where shard has this rank's features.")


def _judge_held(held: int, shards, rank: int) -> None:
    wanted = sum(value.numel() for value, _ in shards.values()) * NUMBER
    if held > wanted + SPARE:
        raise Wrong("whole-held", rank, f"{wanted} bytes of parameters: this rank's shards", f"{held} bytes",
                    "The values are right, and memory is saved in name only. What keeps the whole weight alive?",
                    "A slice is a view, and keeps all of its memory: .clone() it. And keep no whole layer.")


def _judge_sent(sent, counts, rank: int, ranks: int) -> None:
    for direction, bytes_, count in zip(("forward", "backward"), sent, counts, strict=True):
        limit = most_sent(count, ranks)
        if bytes_ > limit + FLAGS:
            allowed = f"one all_reduce of {count} numbers" if count else "nothing"
            raise Wrong(
                "too-many-bytes", rank, f"{limit} bytes {direction}: {allowed}", f"{bytes_} bytes",
                "The values are right. But what has to travel: weights, inputs, hidden features, or a sum?",
                "Forward: reduce_from_ranks of the last layer's product. Backward: what f adds up. No all_gather.")


def most_sent(count: int, ranks: int) -> int:
    """Return the bytes that a rank may send for an all_reduce of ``count`` numbers with any good algorithm."""
    from dtlib.theory.collectives import elements_sent_by_the_busiest

    algorithms = ("ring", "recursive_doubling", "tree")
    return NUMBER * max(elements_sent_by_the_busiest("all_reduce", each, ranks, count) for each in algorithms)


EXERCISES = {
    "row-fix": Exercise("RowParallel", observe_row, judge_row, any_size=True),
    "mlp-build": Exercise("MyMLP", observe_mlp, judge_mlp, any_size=True),
}
