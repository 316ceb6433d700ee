"""The captured graphs of all replicas become one: every mark is replaced by a real exchange between all of them.

    replica 0    ops -> mark -> ops            ops -\\                /-> ops
    replica 1    ops -> mark -> ops   --->     ops --> all_reduce --> ops
    replica 2    ops -> mark -> ops            ops -/                \\-> ops

Replicas go from mark to mark in step. So when the shared parameters are changed, every replica has read the old ones,
and none has yet read the new ones.
"""

import operator

import torch
from torch import fx, nn

from dtlib.errors import DtlibError
from dtlib.parallel.replicator.exchange import APPLY, EXCHANGES
from dtlib.parallel.replicator.optimizer import ReplicatedOptimizer


class Apply(nn.Module):
    """The one step of an optimizer for all replicas: they share its parameters."""

    def __init__(self, optimizer: ReplicatedOptimizer):
        super().__init__()
        self.optimizer = optimizer

    def forward(self, gradients: list[torch.Tensor], used: torch.Tensor) -> None:
        self.optimizer.apply(gradients, used)


def rewire(graphs: list[fx.GraphModule], optimizers: list[ReplicatedOptimizer]) -> fx.GraphModule:
    """One graph: the inputs of replica 0, of replica 1, ... in; a list of outputs a replica out.

    Raises:
        DtlibError: if replicas do not exchange the same in the same order.
    """
    whole, root = fx.Graph(), nn.Module()
    replicas = [_Replica(number, graph, whole, root) for number, graph in enumerate(graphs)]
    count = 0
    while marks := [replica.advance() for replica in replicas]:
        _check_alike(graphs, marks, count)
        mark, count = marks[0], count + 1
        if mark.op == "output":
            break
        if mark.target is APPLY:
            # The averages are the same on all replicas.
            _, gradients, used, number = replicas[0].translate(mark.args)
            root.add_module(f"optimizer_{number}", Apply(optimizers[number]))
            node = whole.call_module(f"optimizer_{number}", (gradients, used))
        else:
            tensors = [replica.translate(mark.args[0]) for replica, mark in zip(replicas, marks, strict=True)]
            node = whole.call_function(EXCHANGES[mark.target], (tensors, *mark.args[1:]))
            for replica, mark in zip(replicas, marks, strict=True):
                replica.receive(mark, node)
        node.meta["exchange"] = describe(graphs[0], marks[0])
    whole.output([replica.translate(mark.args[0]) for replica, mark in zip(replicas, marks, strict=True)])
    whole.lint()
    return fx.GraphModule(root, whole)


class _Replica:
    """A replica's graph on its way into the whole."""

    def __init__(self, number, graph, whole, root):
        self.number, self.graph, self.whole, self.root = number, graph, whole, root
        self.values = {}  # this replica's nodes: those of the whole that stand for them
        self.rest = iter(graph.graph.nodes)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._put(node, whole.placeholder(f"replica_{number}_{node.name}"))

    def advance(self):
        """Copy nodes up to the next mark, or to the output, and give that."""
        for node in self.rest:
            if node.op == "output" or node.target in EXCHANGES or node.target is APPLY:
                return node
            if node.op == "get_attr":
                self._put(node, self.whole.get_attr(self._shared(node.target)))
            elif node.op != "placeholder":
                self._put(node, self.whole.node_copy(node, self.values.__getitem__))

    def translate(self, arguments):
        return fx.map_arg(arguments, self.values.__getitem__)

    def receive(self, mark, node):
        self._put(mark, self.whole.call_function(operator.getitem, (node, self.number)))

    def _put(self, node, copy):
        self.values[node] = copy
        copy.meta["replica"] = self.number

    def _shared(self, name) -> str:
        """The name in the whole of a tensor that this graph calls ``name``: one for all replicas that use it."""
        tensor = getattr(self.graph, name)
        shared = f"tensor_{id(tensor)}"
        if not hasattr(self.root, shared):
            # As it is, not as a parameter: the whole belongs to no model.
            object.__setattr__(self.root, shared, tensor)
        return shared


def describe(graph: fx.GraphModule, mark: fx.Node) -> str:
    """A mark in words: ``all_reduce mean of (7,) float64``."""
    if mark.op == "output":
        return "the end"
    args: tuple = mark.args
    if mark.target is APPLY:
        return f"apply_gradients of optimizer {args[3]}: {len(args[0])} parameters"
    value = mark.meta["val"] if mark.target is not torch.ops.dtlib.all_gather.default else args[0].meta.get("val")
    shape = f"{tuple(value.shape)} {value.dtype}".replace("torch.", "") if value is not None else "a constant"
    op = f" {args[1]}" if isinstance(args[1], str) else ""
    return f"{str(mark.target).split('.')[1]}{op} of {shape}"  # dtlib.all_reduce.default


def _check_alike(graphs, marks, count) -> None:
    texts = [describe(graph, mark) for graph, mark in zip(graphs, marks, strict=True)]
    for replica, text in enumerate(texts):
        if text != texts[0]:
            raise DtlibError(
                f"Replicas must exchange the same in the same order: exchange {count} is {texts[0]} on replica 0 and "
                f"{text} on replica {replica}."
            )
