"""Observation of layers that are split over ranks, and the expected results."""

from dtlib.lab.checks.answer_memory import Snapshot, nbytes

BATCH, FEATURES, OUTPUTS = 4, 24, 5  # sizes of the row-parallel layer; features divide by 2, 3, 4
WIDTH, HIDDEN = 6, 48  # sizes of the perceptron; hidden features divide by 2, 3 and 4
PASSES = 2


def make_linears(kind: str) -> list:
    """Return the unsplit layers, the same on all ranks."""
    import torch
    from torch import nn

    sizes = {"row": [(FEATURES, OUTPUTS)], "mlp": [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]}[kind]
    torch.manual_seed(2)
    return [nn.Linear(*size).double() for size in sizes]


def make_input(kind: str, step: int):
    """Return the whole input, and the gradient of the whole output.

    The perceptron's second input has one more dimension.
    """
    import torch

    generator = torch.Generator().manual_seed(step + 1)
    first = (BATCH,) if kind == "row" else ((5,), (2, 3))[step]
    inside, outside = (FEATURES, OUTPUTS) if kind == "row" else (WIDTH, WIDTH)
    return [torch.randn(*first, size, dtype=torch.float64, generator=generator) for size in (inside, outside)]


def slice_of(tensor, rank: int, ranks: int, dim: int = -1):
    """Return this rank's slice along a dimension that divides by the ranks."""
    return tensor.chunk(ranks, dim)[rank]


# Observation of an answer


def observe_row(cls, comm) -> dict:
    """Observe ``RowParallel(linear, comm)``, called with this rank's features (the fix)."""
    return _observe(cls, comm, "row", lambda whole: slice_of(whole, comm.rank, comm.size))


def observe_mlp(cls, comm) -> dict:
    """Observe ``MyMLP(linear1, linear2, comm)``, called with the whole input (the build)."""
    return _observe(cls, comm, "mlp", lambda whole: whole)


def _observe(cls, comm, kind: str, mine) -> dict:
    """Return bytes stored, and for two passes outputs, gradients, and bytes sent forward and backward."""
    import torch

    from dtlib.comm.watch.recorder import recording

    with Snapshot(cls) as before:
        whole = make_linears(kind)
        theirs = [parameter for linear in whole for parameter in linear.parameters()]
        model = cls(*whole, comm)
        shared = _with_memory_of(model, theirs)
        # Without the whole layers, only memory that the answer keeps counts.
        del whole, theirs
        seen = {"held": nbytes(before.new(of=[model])), "shared": shared, "passes": []}
    for step in range(PASSES):
        x, gradient = make_input(kind, step)
        x = mine(x).clone().requires_grad_()
        model.zero_grad()
        one = {}
        with recording() as forward:
            out = model(x)
        if type_of(out) != "Tensor":
            return {"type": type_of(out)}
        one["out"] = out.detach().tolist()
        with recording() as backward:
            if out.shape == gradient.shape and out.requires_grad:
                out.backward(gradient)
        one["x"] = numbers(x.grad)
        with torch.no_grad():
            one["quiet"] = numbers(model(x.detach()))
        one["parameters"] = [(numbers(p), numbers(p.grad)) for p in model.parameters()]
        one["sent"] = [sum(e.bytes for e in events if e.kind == "operation") for events in (forward, backward)]
        operations = [e for events in (forward, backward) for e in events if e.kind == "operation"]
        one["gathered"] = sum(e.bytes for e in operations if e.name.startswith("all_gather"))
        seen["passes"].append(one)
    return seen


def _with_memory_of(model, others) -> list:
    """Return the names of parameters that share memory with these tensors."""
    begins = {other.untyped_storage().data_ptr() for other in others}
    return [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() in begins]


def type_of(thing) -> str:
    """Return the name of a type; subclasses of Tensor count as Tensor."""
    import torch

    return "Tensor" if isinstance(thing, torch.Tensor) else type(thing).__name__


def numbers(tensor):
    """Return a tensor as nested lists, or None."""
    return None if tensor is None else tensor.detach().tolist()


# Expected results


def expected(kind: str, ranks: int, step: int) -> dict:
    """Return the right output and gradients of each rank, and results of known mistakes."""
    import torch

    linears = make_linears(kind)
    x, gradient = make_input(kind, step)
    x.requires_grad_()
    *first, last = linears
    inside = torch.nn.functional.gelu(first[0](x)) if first else x
    last(inside).backward(gradient, retain_graph=True)
    ways = {"out": last(inside).detach(), "bias": last.bias.detach(), "summand": [], "x": [], "x_summand": []}
    ways["x_late"] = [_with_f_late(*linears, x, gradient, rank, ranks) if first else [] for rank in range(ranks)]
    ways["activations"] = _with_others(*linears, x) if first else {}
    ways["parameters"] = [_shards_of(linears, rank, ranks) for rank in range(ranks)]
    for rank in range(ranks):
        features = [slice_of(tensor, rank, ranks) for tensor in (inside, last.weight)]
        summand = features[0] @ features[1].T
        (of_this,) = torch.autograd.grad(summand, x, gradient, retain_graph=True)
        ways["summand"].append(summand.detach())
        ways["x"].append(x.grad if first else slice_of(x.grad, rank, ranks))
        ways["x_summand"].append(of_this)
    return ways


def _with_others(linear1, linear2, x) -> dict:
    """Return outputs with other activations than GELU, or with GELU in another place."""
    from torch.nn import functional

    others = {f"{name} for gelu": getattr(functional, name) for name in ("relu", "sigmoid", "silu", "tanh")}
    others |= {"no activation": lambda x: x, "the approximate gelu": lambda x: functional.gelu(x, approximate="tanh")}
    others["gelu twice"] = lambda x: functional.gelu(functional.gelu(x))
    others["no bias in the first layer"] = lambda x: functional.gelu(x - linear1.bias)
    found = {name: linear2(activation(linear1(x))).detach() for name, activation in others.items()}
    found["gelu behind the second layer"] = functional.gelu(linear2(linear1(x))).detach()
    behind = functional.gelu(linear1(x) @ linear2.weight.T) + linear2.bias
    return found | {"gelu behind the sum": behind.detach()}


def _with_f_late(linear1, linear2, x, gradient, rank: int, ranks: int) -> list:
    """Return the gradients of x if ranks sum gradients behind or before gelu, instead of at x."""
    import torch

    before = linear1(x)
    behind = torch.nn.functional.gelu(before)
    found = []
    for hidden in (behind, before):
        (whole,) = torch.autograd.grad(linear2(behind), hidden, gradient, retain_graph=True)
        added_up = sum(whole.chunk(ranks, -1))
        found += torch.autograd.grad(slice_of(hidden, rank, ranks), x, added_up, retain_graph=True)
    return found


def _shards_of(linears, rank: int, ranks: int) -> dict:
    """Return a rank's parameters by name, as (values, gradients).

    The last layer is split by rows, the layer before it by columns.
    """
    *first, last = linears
    dims = {"the second weight" if first else "the weight": (last.weight, 1)}
    for linear in first:
        dims |= {"the first weight": (linear.weight, 0), "the first bias": (linear.bias, 0)}
    shards = {
        name: (slice_of(whole.detach(), rank, ranks, dim), slice_of(whole.grad, rank, ranks, dim))
        for name, (whole, dim) in dims.items()
    }
    return shards | {"the second bias" if first else "the bias": (last.bias.detach(), last.bias.grad)}
