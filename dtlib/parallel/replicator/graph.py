"""One graph for one step of all replicas: each replica's step is captured, and its marks become real exchanges.

    def step_fn(inputs):                  replica 0    ops -> mark -> ops            ops -\\                /-> ops
        loss = ...                 --->   replica 1    ops -> mark -> ops   --->     ops --> all_reduce --> ops
        optimizer.minimize(loss)          replica 2    ops -> mark -> ops            ops -/                \\-> ops
        return loss

``make_fx`` runs the step function on tensors without values and records its operations. A step that reads values (``if
loss > 1``, ``.item()``), draws random numbers or changes outside tensors is refused, and the error shows its line. Each
step is captured again, so Python variables have their current values.

All replicas reach a mark before any replica continues. So when the shared parameters change, every replica has read the
old values, and no replica has read the new ones.
"""

import operator
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import fx, nn
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtlib.comm.call import callers_line
from dtlib.errors import DtlibError
from dtlib.parallel.replicator.exchange import APPLY, EXCHANGE, combine_all

BETWEEN = "or use Replicator(comm), a process per replica, where it works"
VALUES = f"a graph does not know values: compute with tensors, for instance torch.where, {BETWEEN}"
# Methods that turn a tensor into a Python value.
METHODS = {name: VALUES for name in (
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__format__",
    "__contains__",
)}  # fmt: skip
METHODS["backward"] = "gradients are part of the step: call minimize(loss) of replicator.wrap_optimizer(...)"


# Capturing


def capture(step: Callable, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return the operations of ``step(*tensors)``, a function that returns a list of tensors, as a graph."""

    def watched(*inputs):
        with _NoValues(), _NoSideEffects(inputs):
            try:
                return step(*inputs)
            except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
                raise DtlibError(
                    f"An in-graph replicator cannot capture {error.func}, whose result depends on values: {VALUES}."
                ) from None

    # Fake tensors have shapes and dtypes but no values, so nothing is computed during capture.
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        return make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)


def _refuse(what: str, why: str) -> NoReturn:
    raise DtlibError(f"An in-graph replicator cannot capture {what} in {callers_line()!r}; {why}.")


class _NoValues(TorchFunctionMode):
    """Refuse to turn a tensor into a Python value."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in METHODS and args and isinstance(args[0], torch.Tensor):
            _refuse(name, METHODS[name])
        return function(*args, **(kwargs or {}))


class _NoSideEffects(TorchDispatchMode):
    """Refuse random numbers and writes to tensors from outside of the step."""

    def __init__(self, inputs):
        super().__init__()
        # Keyed by storage, because views share it. The reference keeps the storage alive, so its address is not reused.
        self.outside = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "dtlib":
            return function(*args, **kwargs)
        schema = function._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        by_name = {argument.name: argument.default_value for argument in schema.arguments} | given | kwargs
        # Attention only draws random numbers if it has dropout.
        if torch.Tag.nondeterministic_seeded in function.tags and by_name.get("dropout_p") != 0:
            _refuse(
                f"{function}, which draws random numbers",
                f"replicas in one process would draw from one generator: draw them in input_fn(replica_id), {BETWEEN}",
            )
        touched = [argument for argument in schema.arguments if argument.alias_info]
        touched = [argument for argument in touched if self._is_outside(by_name[argument.name])]
        trains_statistics = "batch_norm" in str(function) and by_name.get("training")
        if any(argument.alias_info.is_write for argument in touched) or (
            trains_statistics and self._is_outside(by_name.get("running_mean"))
        ):
            _refuse(
                f"{function}, which changes a tensor from outside (an input, a parameter, a running statistic)",
                "replicas in one process would all change the same one: compute a new tensor and return it "
                f"(BatchNorm: track_running_stats=False), {BETWEEN}",
            )
        result = function(*args, **kwargs)
        # The result may be a view of an outside tensor, so a write to it must be refused, too.
        if touched and isinstance(result, torch.Tensor) and "lift_fresh" not in str(function):
            self.outside[result.untyped_storage()._cdata] = result.untyped_storage()
        return result

    def _is_outside(self, tensor) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        return not isinstance(tensor, fake_tensor.FakeTensor) or tensor.untyped_storage()._cdata in self.outside


# Rewiring


class StepGraph:
    """One step of all replicas.

    ``graph.exchanges`` are the nodes at which replicas exchange tensors. ``graph.module`` is the
    ``torch.fx.GraphModule``, and ``graph.module.code`` its Python code.
    """

    def __init__(self, module: fx.GraphModule, replicas: int):
        self.module, self.replicas = module, replicas
        self.exchanges = [node for node in module.graph.nodes if "exchange" in node.meta]

    def __call__(self, *tensors: torch.Tensor) -> list[list]:
        """Run the step on all replicas' inputs; return a list of outputs for each replica."""
        with torch.no_grad():  # gradients are operations of the graph
            return self.module(*tensors)


def rewire(graphs: list[fx.GraphModule], apply: list[Callable]) -> StepGraph:
    """Merge the replicas' graphs into one: it takes all inputs and returns a list of outputs for each replica.

    ``apply[n](gradients, used)`` is the step of optimizer n. It runs once for all replicas, because they share
    parameters.

    Raises:
        DtlibError: if replicas do not run the same exchanges in the same order.
    """
    whole, root = fx.Graph(), nn.Module()
    replicas = [_Replica(number, graph, whole, root) for number, graph in enumerate(graphs)]
    count = 0
    # Copy every replica up to its next mark, then insert one exchange that takes the tensors of all replicas.
    while marks := [replica.advance() for replica in replicas]:
        texts = [_text_of(mark) for mark in marks]
        for replica, text in enumerate(texts):
            if text != texts[0]:
                raise DtlibError(
                    f"Replicas must make equal exchanges in equal order: exchange {count} is {texts[0]} on replica 0 "
                    f"and {text} on replica {replica}."
                )
        mark, count = marks[0], count + 1
        if mark.op == "output":
            break
        if mark.target is APPLY:  # the averages are equal on all replicas
            _, *gradients, number = replicas[0].translate(mark.args)
            node = whole.call_function(apply[number], tuple(gradients))
        else:
            tensors = [replica.translate(mark.args[0]) for replica, mark in zip(replicas, marks, strict=True)]
            node = whole.call_function(combine_all, (tensors, mark.args[1]))
            for replica, mark in zip(replicas, marks, strict=True):
                replica.put(mark, whole.call_function(operator.getitem, (node, replica.number)))
        node.meta["exchange"] = texts[0]
    whole.output([replica.translate(mark.args[0]) for replica, mark in zip(replicas, marks, strict=True)])
    return StepGraph(fx.GraphModule(root, whole), len(graphs))


class _Replica:
    """The graph of one replica while it is copied into the merged graph."""

    def __init__(self, number: int, graph: fx.GraphModule, whole: fx.Graph, root: nn.Module):
        self.number, self.graph, self.whole, self.root = number, graph, whole, root
        self.values: dict[fx.Node, fx.Node] = {}  # nodes of this replica: their copies in the merged graph
        self.rest = iter(graph.graph.nodes)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.put(node, whole.placeholder(f"replica_{number}_{node.name}"))

    def advance(self) -> fx.Node:
        """Copy nodes up to the next mark or the output, and return that node."""
        for node in self.rest:
            if node.op == "output" or node.target in (EXCHANGE, APPLY):
                return node
            if node.op == "get_attr":  # an outside tensor, shared by all replicas
                tensor = getattr(self.graph, node.target)
                # Bypass nn.Module's registration: the merged graph does not own the parameters.
                object.__setattr__(self.root, f"tensor_{id(tensor)}", tensor)
                self.put(node, self.whole.get_attr(f"tensor_{id(tensor)}"))
            elif node.op != "placeholder":
                self.put(node, self.whole.node_copy(node, self.values.__getitem__))
        raise AssertionError("a graph ends with its output")

    def translate(self, arguments):
        return fx.map_arg(arguments, self.values.__getitem__)

    def put(self, node: fx.Node, copy: fx.Node) -> None:
        self.values[node] = copy
        copy.meta["replica"] = self.number


def described(tensor: torch.Tensor) -> str:
    """Describe a tensor: ``(7,) float64``."""
    return f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def _text_of(mark: fx.Node) -> str:
    """Describe a mark: ``all_reduce mean of (7,) float64``."""
    if mark.op == "output":
        return "the end"
    args: tuple = mark.args
    if mark.target is APPLY:
        return f"apply_gradients of optimizer {args[3]}: {len(args[0])} parameters"
    return f"all_reduce {args[1]} of {described(mark.meta['val'])}"
