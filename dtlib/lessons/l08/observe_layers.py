"""Lesson 08: layers cut over ranks, observed: outputs, gradients, bytes sent and held, and what they should be."""

from dtlib.lab.checks.held import Snapshot, nbytes

BATCH, FEATURES, OUTPUTS = 4, 24, 5  # of the row-parallel layer; features divide by 2, 3 and 4
WIDTH, HIDDEN = 6, 48  # of the perceptron; hidden features divide by 2, 3 and 4
PASSES = 2


def make_linears(kind: str) -> list:
    """The whole layers, the same on all ranks."""
    import torch
    from torch import nn

    sizes = {"row": [(FEATURES, OUTPUTS)], "mlp": [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]}[kind]
    torch.manual_seed(2)
    return [nn.Linear(*size).double() for size in sizes]


def make_input(kind: str, step: int):
    """The whole input and the gradient of the whole output; the perceptron's second one has a dimension more."""
    import torch

    generator = torch.Generator().manual_seed(step + 1)
    first = (BATCH,) if kind == "row" else ((5,), (2, 3))[step]
    inside, outside = (FEATURES, OUTPUTS) if kind == "row" else (WIDTH, WIDTH)
    return [torch.randn(*first, size, dtype=torch.float64, generator=generator) for size in (inside, outside)]


def slice_of(tensor, rank: int, ranks: int, dim: int = -1):
    """This rank's slice along a dimension that divides by the ranks."""
    return tensor.chunk(ranks, dim)[rank]


# What an answer does


def observe_row(cls, comm) -> dict:
    """fix: ``RowParallel(linear, comm)``, called with this rank's features."""
    return _observe(cls, comm, "row", lambda whole: slice_of(whole, comm.rank, comm.size))


def observe_mlp(cls, comm) -> dict:
    """build: ``MyMLP(linear1, linear2, comm)``, called with the whole input."""
    return _observe(cls, comm, "mlp", lambda whole: whole)


def _observe(cls, comm, kind: str, mine) -> dict:
    """Bytes held, and in each of two passes: outputs, gradients, and bytes sent forward and backward."""
    import torch

    from dtlib.comm.watch.recorder import recording

    with Snapshot(cls) as before:
        whole = make_linears(kind)
        theirs = [parameter for linear in whole for parameter in linear.parameters()]
        model = cls(*whole, comm)
        shared = _with_memory_of(model, theirs)
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
    """The parameters of the model that lie in the memory of these tensors, by name."""
    begins = {other.untyped_storage().data_ptr() for other in others}
    return [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() in begins]


def type_of(thing) -> str:
    import torch

    return "Tensor" if isinstance(thing, torch.Tensor) else type(thing).__name__


def numbers(tensor):
    return None if tensor is None else tensor.detach().tolist()


# What it should do


def expected(kind: str, ranks: int, step: int) -> dict:
    """Of the whole layers: the output, and what of each rank is right and what is wrong in a way that has a name."""
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
    """The output with something else than GELU between the two layers, or with it elsewhere."""
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
    """The gradient of x where the hidden features' gradients are added up over ranks: behind gelu, or before it."""
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
    """A rank's parameters by name: their values and gradients; the last layer is cut by rows, one before by columns."""
    *first, last = linears
    dims = {"the second weight" if first else "the weight": (last.weight, 1)}
    for linear in first:
        dims |= {"the first weight": (linear.weight, 0), "the first bias": (linear.bias, 0)}
    shards = {
        name: (slice_of(whole.detach(), rank, ranks, dim), slice_of(whole.grad, rank, ranks, dim))
        for name, (whole, dim) in dims.items()
    }
    return shards | {"the second bias" if first else "the bias": (last.bias.detach(), last.bias.grad)}
