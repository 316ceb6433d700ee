"""A rewired graph, to run, to read and to draw."""

import torch
from torch import fx


class StepGraph:
    """One step of all replicas.

    ``print(graph)`` shows it as a table, ``graph.dot()`` as source for Graphviz, ``graph.code`` as Python;
    ``graph.exchanges`` are the nodes at which replicas meet, and ``graph.module`` is the ``torch.fx.GraphModule``.
    """

    def __init__(self, module: fx.GraphModule, replicas: int):
        self.module = module
        self.replicas = replicas
        self.exchanges = [node for node in module.graph.nodes if "exchange" in node.meta]

    def __call__(self, *tensors):
        with torch.no_grad():  # gradients are operations of the graph
            return self.module(*tensors)

    @property
    def code(self) -> str:
        return self.module.code

    def __str__(self):
        """Operations of each replica between exchanges, from top to bottom.

        replica 0       replica 1
        13 operations   13 operations
        ==== all_reduce mean of (7,) float64 ====
        """
        width = 16
        lines = ["".join(f"replica {r}".ljust(width) for r in range(self.replicas)).rstrip()]
        counts = [0] * self.replicas
        for node in self.module.graph.nodes:
            if node in self.exchanges or node.op == "output":
                if any(counts):
                    lines.append("".join(f"{count} operations".ljust(width) for count in counts).rstrip())
                counts = [0] * self.replicas
            elif self._computes(node):
                counts[node.meta["replica"]] += 1
            if node in self.exchanges:
                lines.append(f"==== {node.meta['exchange']} ====")
        return "\n".join(lines)

    def _computes(self, node) -> bool:
        return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)

    def dot(self) -> str:
        """Source for Graphviz: a box of dashes around each replica; exchanges are double octagons between them."""
        lines = ["digraph step {", "  node [shape=ellipse];"]
        for replica in range(self.replicas):
            lines.append(f'  subgraph cluster_{replica} {{ label="replica {replica}"; style=dashed;')
            lines += [
                f'    {node.name} [label="{_label(node)}"];'
                for node in self.module.graph.nodes
                if node.meta.get("replica") == replica and node.op != "get_attr"
            ]
            lines.append("  }")
        # Every replica asks for a variable by itself: those of one name are one box.
        read = [node for node in self.module.graph.nodes if node.op == "get_attr" and node.users]
        boxes = {name: f"variable_{number}" for number, name in enumerate(dict.fromkeys(node.target for node in read))}
        lines += [f'  {box} [shape=box, label="variable"];' for box in boxes.values()]
        lines += [
            f'  {node.name} [shape=doubleoctagon, style=bold, label="{node.meta["exchange"]}"];'
            for node in self.exchanges
        ]
        lines += [
            f"  {boxes[source.target] if source.op == 'get_attr' else source.name} -> {node.name};"
            for node in self.module.graph.nodes
            if node.op != "output"
            for source in node.all_input_nodes
        ]
        return "\n".join([*lines, "}"])


def _label(node):
    if node.op == "placeholder":
        return "input"
    name = getattr(node.target, "__name__", str(node.target))
    return "" if name == "getitem" else name.partition(".")[0]
