"""A rewired graph, to run and to read."""

import torch
from torch import fx


class StepGraph:
    """One step of all replicas.

    ``print(graph)`` shows it as a table, ``graph.code`` as Python; ``graph.exchanges`` are the nodes at which replicas
    meet, and ``graph.module`` is the ``torch.fx.GraphModule``.
    """

    def __init__(self, module: fx.GraphModule, replicas: int):
        self.module = module
        self.replicas = replicas
        self.exchanges = [node for node in module.graph.nodes if "exchange" in node.meta]

    def __call__(self, *tensors: torch.Tensor) -> list[list]:
        with torch.no_grad():  # gradients are operations of the graph
            return self.module(*tensors)

    @property
    def code(self) -> str:
        return self.module.code

    def __str__(self) -> str:
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
