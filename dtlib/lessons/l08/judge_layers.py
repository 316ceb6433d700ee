"""Lesson 08: checks of layers that are split over ranks, by outputs, gradients, bytes sent and memory."""

from dtlib.lab.checks.equality import MARGIN, NUMBER, as_tensor, factors, same
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
                        "One tensor with the shape of the whole layer's output.")
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
            wrong("shared-memory", True, "parameters with separate memory",
                  f"{seen['shared'][0]} in the layer's memory",
                  "detach() returns a view. If this block is trained, what happens to the original layer?",
                  "nn.Parameter(whole.detach().clone()).")
        for step, one in enumerate(seen["passes"]):
            x, out = make_input(kind, step)
            counts = out.numel(), x.numel() if kind == "mlp" else 0
            _judge_sent(one["sent"], counts, rank, ranks)
            # A gather of reduced shards needs fewer bytes.
            wrong("summands-gathered", one.get("gathered", 0) >= out.nbytes,
                  "a sum over ranks by one all_reduce", f"all_gather, of {one.get('gathered')} bytes",
                  "With few ranks the cost is equal. What does each rank send and store with 64 ranks?",
                  "reduce_from_ranks(y, comm): the ring sends at most twice y, with any number of ranks.")


def _judge_output(one, ways, rank: int, ranks: int, step: int) -> None:
    out, bias, summand = ways["out"], ways["bias"], ways["summand"][rank]
    got = as_tensor(one["out"])
    what = f"the output of the whole layers, of shape {tuple(out.shape)}"
    if same(got, out):
        if not same(as_tensor(one["quiet"]), out):
            raise Wrong("no-grad", rank, f"{what}, under torch.no_grad() too", "something else",
                        "Does a necessary operation run only when gradients are computed?")
        return
    wrong = rows(rank, what)
    wrong("second-pass", step, "something else, after a correct first pass",
          "What does the first pass change? And do you support any number of dimensions before the last?")
    wrong("not-reduced", same(got, summand) or same(got, summand + bias), "the summand of this rank's features",
          "Each rank has multiplied only its features. Which operation adds the products?",
          "reduce_from_ranks(y, comm), Megatron-LM's g, gives every rank the sum.")
    wrong("bias-once-a-rank", same(got, out + (ranks - 1) * bias), f"the output with {ranks} times the bias",
          "The weight is cut, the bias is not. How often is the bias in the sum?", "Add the bias after the sum.")
    wrong("no-bias", same(got, out - bias), "the output without the bias",
          "A linear layer has a weight and a bias.", "Add the bias once, after the sum over ranks.")
    wrong("averaged", same(got, (out - bias) / ranks + bias) or same(got, out / ranks), "a mean over ranks",
          "Are the products of all ranks added, or averaged?", 'Use the op "sum", and do not divide.')
    wrong("summed-twice", same(got, bias + ranks * (out - bias)), f"{ranks} times the sum, + bias",
          "How often do you add the summands?", "After one reduce_from_ranks each rank has the sum.")
    for name, other in ways["activations"].items():
        wrong("other-activation", same(got, other), f"the output with {name}",
              "Which function is between the two products, and what follows the second product?",
              "linear1 with its bias, torch.nn.functional.gelu without options, linear2, the sum, its bias.")
    wrong("rounded", got.shape == out.shape and bool((got - out).abs().max() < 1e-3 * out.abs().max()),
          "nearly the right values, but rounded", "In which types do you store and compute?",
          "Use the layer's type: no .float(), and no torch.empty without dtype.")
    if found := factors(got, out - bias, bias) if got.shape == out.shape else None:
        wrong("other-sum", True, f"{found[0]:.3g} times the products, and {found[1]:.3g} times the bias",
              "How often do you add each of the two terms?", "Add the products over ranks, and then the bias, once.")
    wrong("other-values", True, f"others, of shape {tuple(got.shape)}",
          "Is only the last product added over ranks? Do both weights have slice r, of consecutive features?",
          "reduce_from_ranks, g, comes last. Columns of A are rows of its weight.")


def _judge_input_gradient(one, ways, rank: int, ranks: int, step: int) -> None:
    right, summand = ways["x"][rank], ways["x_summand"][rank]
    what = "the gradient of this rank's input"
    wrong = rows(rank, what)
    wrong("no-gradient", one["x"] is None, "none",
          "Do you detach a tensor, or compute it under no_grad?", "autograd knows reduce_from_ranks.")
    got = as_tensor(one["x"])
    if same(got, right):
        return
    # If the gradient of the first weight is right, the second sum comes after it in the backward pass, in f.
    weight, of_weight = next(iter(ways["parameters"][rank].values()))
    weight_is_right = any(
        same(as_tensor(g), of_weight) for p, g in one["parameters"] if g is not None and same(as_tensor(p), weight)
    )
    twice = [ranks * right] * weight_is_right + [sum(late) for late in zip(*ways["x_late"], strict=True)]
    wrong("f-twice", any(same(got, added_up) for added_up in twice), "the sum over ranks, added again over ranks",
          "How often does the backward pass add over ranks between the output and x?",
          "copy_to_ranks, f, once, before the first product; reduce_from_ranks, g, once, after the second.")
    if same(got, ranks * right):
        raise _reduces_too(rank, what, ranks)
    wrong("f-missing", same(got, summand), "the gradient through only this rank's hidden features",
          "All ranks used the same input. Which ranks' gradients belong to it?",
          "copy_to_ranks(x, comm), Megatron-LM's f: returns x, and all-reduces its gradient in the backward pass.")
    wrong("gradient-averaged", same(got, right / ranks) or same(got, summand / ranks), f"1/{ranks} of the right one",
          "Data parallelism averages, because ranks have different samples. Which samples do ranks have here?",
          "Add the gradients of all ranks, and do not divide.")
    wrong("gradients-mixed", len(ways["parameters"][rank]) == 2 and same(got, sum(ways["x"])),
          "the sum over ranks of the gradients of their inputs",
          "Each rank has other features of the input. Why do you add their gradients?",
          "f, copy_to_ranks, is for an input that is equal on all ranks. Here you need only g.")
    wrong("f-late", any(same(got, late) for late in ways["x_late"][rank]), "the result of f after the first product",
          "f needs a tensor that is equal on all ranks. Which tensors do the ranks have after the first product?",
          "linear(copy_to_ranks(x, comm), self.weight1, self.bias1)")
    wrong("other-gradient", True, "something else", "What does the backward pass send, and in which order?",
          "f: forward nothing, backward all_reduce. g: forward all_reduce, backward nothing.")


def _reduces_too(rank: int, what: str, ranks: int) -> Wrong:
    return Wrong("g-reduces-too", rank, what, f"{ranks} times as much",
                 "The output is equal on all ranks, and so is its gradient. What is the sum of equal gradients?",
                 "In the backward pass of a sum, each summand gets the same gradient: reduce_from_ranks does this.")


def _judge_parameters(one, ways, rank: int, ranks: int) -> None:
    for name, (value, right) in ways["parameters"][rank].items():
        gradient = _gradient_of(
            one["parameters"], value, name, rank, [shards[name][0] for shards in ways["parameters"]]
        )
        what = f"the gradient of {name}"
        wrong = rows(rank, what)
        wrong("no-gradient", gradient is None, "none", f"Does this rank use {name} in a way that autograd sees?",
              "Use each parameter on every rank: a bias used on one rank only becomes different from the others.")
        if same(gradient, right):
            continue
        wrong("gradient-negative", same(gradient, -right), "the same with the opposite sign",
              "How often do you use it, and with which sign?", "Output: linear(x, self.weight), summed, + self.bias.")
        wrong("gradient-zero", not gradient.any(), "zeros", f"Do you use {name} on this rank too, or multiply it by 0?",
              "Use each parameter on every rank, in the same way.")
        if same(gradient, ranks * right) and "bias" not in name:
            raise _reduces_too(rank, what, ranks)
        wrong("gradient-scaled", same(gradient, ranks * right) or same(gradient, right / ranks),
              f"{ranks} times as much, or 1/{ranks}", "This gradient needs no sum over ranks, and no division.",
              "Add the bias once, after the sum, on every rank.")
        everyones = sum(shards[name][1] for shards in ways["parameters"])
        wrong("shards-reduced", same(gradient, everyones) or same(gradient, everyones / ranks),
              "the gradient of all ranks' shards together",
              "Ranks have different features. Why do you add their gradients?",
              "The gradient of a shard is complete on its rank: nothing is sent for it.")
        wrong("other-gradient", True, "something else",
              "The output is right. Through which terms does it depend on this parameter, and with which factors?",
              "Use each shard once, in this rank's product; use a bias once, after the sum, on every rank.")


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
          "the shard of another rank", "Which rank has which shard? Rank r has shard r.")
    if any(as_tensor(found).shape == value.shape for found, _ in parameters):
        hints = ("Rank r has consecutive features, slice r. Which features does your code select?",
                 "whole.chunk(comm.size, dim)[comm.rank]")
        if value.dim() == 1 and "first" not in name:
            hints = ("The output can be right by chance. Is a bias divided by the ranks, or zero on some of them?",
                     "Each rank keeps the layer's whole bias, and adds it once, after the sum.")
        raise Wrong("shard-values", rank, f"{expected}, as in the whole layer", "this shape, with other values", *hints)
    wrong("no-shard", True, f"parameters of shapes {shapes}", "Which parameters does this rank keep and train?",
          "self.weight = nn.Parameter(shard.detach().clone()). shard has the features of this rank.")


def _judge_held(held: int, shards, rank: int) -> None:
    wanted = sum(value.numel() for value, _ in shards.values()) * NUMBER
    if held > wanted + MARGIN:
        raise Wrong("whole-held", rank, f"{wanted} bytes of parameters: this rank's shards", f"{held} bytes",
                    "The values are right, but no memory is saved. What keeps the whole weight in memory?",
                    "Keep no whole weight: no layer, no array, no bytes, and no view (.clone() it).")


def _judge_sent(sent, counts, rank: int, ranks: int) -> None:
    for direction, bytes_, count in zip(("forward", "backward"), sent, counts, strict=True):
        limit = most_sent(count, ranks)
        if bytes_ > limit + FLAGS:
            allowed = f"one all_reduce of {count} numbers" if count else "nothing"
            raise Wrong(
                "too-many-bytes", rank, f"{limit} bytes {direction}: {allowed}", f"{bytes_} bytes",
                "The values are right. But which tensors must be sent: weights, inputs, hidden features, or a sum?",
                "Forward: reduce_from_ranks of the last layer's product. Backward: the sum of f. No all_gather.")


def most_sent(count: int, ranks: int) -> int:
    """Return the bytes that a rank may send for an all_reduce of ``count`` numbers with any good algorithm."""
    from dtlib.theory.collectives import elements_sent_by_the_busiest

    algorithms = ("ring", "recursive_doubling", "tree")
    return NUMBER * max(elements_sent_by_the_busiest("all_reduce", each, ranks, count) for each in algorithms)


EXERCISES = {
    "row-fix": Exercise("RowParallel", observe_row, judge_row, any_size=True),
    "mlp-build": Exercise("MyMLP", observe_mlp, judge_mlp, any_size=True),
}
