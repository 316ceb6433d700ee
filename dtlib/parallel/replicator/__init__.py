"""TF-Replicator's programming model: users write the step of one replica, and the library runs it on all replicas.

    input_fn(replica_id)      the inputs of one replica
    step_fn(inputs)           the step of one replica: loss, gradients, optimizer

    between-graph: one process per replica           in-graph: one process has all replicas
      process 0   step_fn --\\                          step_fn, captured for each replica ---\\
                             >  collectives of comm      graph 0 --\\                            >  one graph
      process 1   step_fn --/                           graph 1 --- marks become exchanges ---/

P. Buchlovsky et al., "TF-Replicator: distributed machine learning for researchers", arXiv:1902.00465, 2019.

    replicator = Replicator(comm)                     # or Replicator(replicas=4)
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def input_fn(replica_id):
        return batches[replica_id :: replicator.replicas]

    def step_fn(inputs):
        x, y = inputs
        loss = cross_entropy(model(x), y)
        optimizer.minimize(loss)
        return loss

    losses = replicator.run(step_fn, input_fn, steps=10).mean(1)
"""

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from dtlib.comm import AnyCommunicator, as_communicator, types
from dtlib.errors import DtlibError, number
from dtlib.parallel.replicator.exchange import MAP_REDUCE_OPS, between_graph, exchanged, in_graph
from dtlib.parallel.replicator.graph import StepGraph, capture, described, rewire
from dtlib.parallel.replicator.optimizer import ReplicatedOptimizer

__all__ = ["ReplicatedOptimizer", "Replicator", "StepGraph"]


class Replicator:
    """Run a training step on all replicas.

    Args:
        comm: between-graph replication: every rank of this communicator is a replica. All ranks call the same methods
            in the same order.
        replicas: in-graph replication: the number of replicas in this process. In each step, their graphs are captured
            and rewired into one graph. The replicas share one set of parameters and run in sequence on their tensors'
            device.

    Both kinds of replication give the same results for the same ``input_fn`` and ``step_fn``, up to rounding.
    ``replica_id`` is the number of the replica that runs, and ``replicas`` the number of replicas.

    Differences from the paper: there, each in-graph replica has its own device, and the graph is captured once. Here
    the graph shows the computations and exchanges of a step, and is slower than one process. Training is synchronous.
    """

    def __init__(self, comm: AnyCommunicator | None = None, replicas: int | None = None):
        if (comm is None) == (replicas is None):
            raise DtlibError("Replicator needs comm (a process per replica) or replicas=N (in this process), not both.")
        if replicas is not None:
            number("Replicator(replicas=...)", replicas, least=1, whole=True)
        self.comm = comm if comm is None else as_communicator(comm)
        self.replicas: int = replicas or self.comm.size  # type: ignore[union-attr]  # there is one of the two
        self.replica_id = self.comm.rank if self.comm else 0
        self._exchange = between_graph(self.comm) if self.comm else in_graph
        self._optimizers: list[ReplicatedOptimizer] = []
        self._graph: StepGraph | None = None

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> ReplicatedOptimizer:
        """Return an optimizer with ``minimize(loss)``, which averages gradients over replicas before the step.

        With one process per replica, the optimizer's parameters are set to rank 0's values.
        """
        wrapped = ReplicatedOptimizer(optimizer, self._exchange, len(self._optimizers), self.comm is None)
        self._optimizers.append(wrapped)
        if self.comm:
            for parameter in wrapped.everything():
                self.comm.broadcast(parameter)
        return wrapped

    # Inside step_fn

    def map_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine one tensor of every replica element by element; gradients flow back to every replica.

        ``op`` is ``sum`` or ``mean``.
        """
        _check_tensor(tensor, "map_reduce")
        if op not in MAP_REDUCE_OPS:
            raise DtlibError(f"map_reduce has no op {op!r}: choose one of {', '.join(MAP_REDUCE_OPS)}.")
        # Raise the same errors as with processes for tensors that cannot be combined.
        types.combiner(tensor, op, "map_reduce")
        return exchanged(tensor, op, self._exchange)

    def map_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every replica's tensor along the first axis; numbers become a vector.

        ``tensor`` has the same shape on all replicas. Gradients flow back to every replica. It is an all-reduce, so it
        sends more than an all-gather.
        """
        _check_tensor(tensor, "map_gather")
        # One row per replica: this replica's tensor in its row, and zeros in the other rows.
        rows = [tensor if r == self.replica_id else torch.zeros_like(tensor) for r in range(self.replicas)]
        whole = self.map_reduce(torch.stack(rows))
        return whole.flatten(0, 1) if tensor.dim() else whole

    # Running

    def run(self, step_fn: Callable, input_fn: Callable, steps: int | None = None) -> object:
        """Run ``step_fn`` on all replicas, step by step.

        Args:
            step_fn: ``step_fn(inputs)`` is the step of one replica. It returns None, a tensor, or tuples, lists and
                dictionaries of tensors. With in-graph replication, it is captured once per replica in each step.
            input_fn: ``input_fn(replica_id)`` returns an iterable of inputs for that replica. Inputs are tensors, or
                tuples, lists and dictionaries of tensors.
            steps: number of steps. Default: until the first replica has no more inputs.

        Returns:
            The results of ``step_fn``, each tensor stacked as ``[steps, replicas, ...]``; equal on every process.

        Raises:
            DtlibError: if inputs end before ``steps``, and for a line that cannot be captured.
        """
        here = [self.replica_id] if self.comm else range(self.replicas)
        sources = [iter(input_fn(replica)) for replica in here]
        results: list[list] = []
        while steps is None or len(results) < steps:
            inputs = self._next_inputs(sources, steps, len(results))
            if inputs is None:
                break
            outputs = [step_fn(inputs[0])] if self.comm else self._in_one_graph(step_fn, inputs)
            # Copies, because later steps may change a tensor in place, for example a parameter.
            results.append([tree_map_only(torch.Tensor, torch.clone, _checked(output)) for output in outputs])
        return self._stacked(results)

    def _in_one_graph(self, step_fn, inputs):
        graphs, packed, flat = [], [], []
        try:
            for self.replica_id, obj in enumerate(inputs):
                tensors, packing = tree_flatten(obj)
                for leaf in tensors:
                    if not isinstance(leaf, torch.Tensor):
                        raise DtlibError(
                            f"input_fn({self.replica_id}) returned {leaf!r:.40}: return tensors, for example "
                            f"torch.tensor({leaf!r:.40})."
                        )

                def one_step(*tensors, packing=packing):
                    outputs, spec = tree_flatten(_checked(step_fn(tree_unflatten(tensors, packing))))
                    packed.append(spec)
                    return outputs

                # Capture runs step_fn once for each replica, with ``replica_id`` set to that replica.
                graphs.append(capture(one_step, tensors))
                flat += tensors
        finally:
            self.replica_id = 0
        self._graph = rewire(graphs, [optimizer.apply for optimizer in self._optimizers])
        return [tree_unflatten(mine, spec) for mine, spec in zip(self._graph(*flat), packed, strict=True)]

    def graph(self) -> StepGraph:
        """Return the graph of the last step."""
        if self._graph is None:
            why = "a process per replica has none" if self.comm else "nothing has run yet"
            raise DtlibError(f"graph() shows the last step of Replicator(replicas=...): {why}.")
        return self._graph

    def _next_inputs(self, sources, steps, done):
        """Return the next inputs of this process's replicas, or None if any replica has no more inputs."""
        end = object()
        inputs = [next(source, end) for source in sources]
        has_more = torch.tensor([obj is not end for obj in inputs], dtype=torch.uint8)
        if self.comm:
            has_more = self.comm.all_gather(has_more.new_empty(self.replicas), has_more)
        if has_more.all():
            return inputs
        if steps is not None:
            raise DtlibError(
                f"input_fn({has_more.tolist().index(0)}) returned inputs for {done} of {steps} steps: return more, or "
                "leave steps out, and the run ends with the inputs."
            )
        return None

    def _stacked(self, results):
        if not results:
            raise DtlibError("run has made no step: input_fn returned no inputs, or steps is 0.")
        outputs = [output for step in results for output in step]
        # Results are stacked, so all steps and replicas must return the same nesting, shapes and dtypes.
        kinds = list(dict.fromkeys(_kind(output) for output in outputs))
        if self.comm:
            kinds = [kind for theirs in self.comm.all_gather_object(kinds) for kind in theirs]
        if other := next((kind for kind in kinds if kind != kinds[0]), None):
            raise DtlibError(
                f"step_fn returned {kinds[0]} and, in another step or on another replica, {other}: return the same "
                "each time, with keys in one order, because results are stacked."
            )
        return tree_map(self._stack, *outputs)

    def _stack(self, *column):
        if column[0] is None:
            return None
        stacked = torch.stack(column)
        if self.comm:
            return self.comm.all_gather(stacked.new_empty(self.replicas, *stacked.shape), stacked).transpose(0, 1)
        return stacked.unflatten(0, (len(column) // self.replicas, self.replicas))


def _check_tensor(tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DtlibError(f"{name} takes a tensor, and got {type(tensor).__name__}: use torch.tensor().")


def _kind(output) -> str:
    """Describe the nesting, shapes and dtypes of an output: ``{'loss': (3,) float64}``."""
    return str(tree_map_only(torch.Tensor, described, output))


def _checked(output):
    """Return outputs without their gradients."""
    for leaf in tree_leaves(output):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise DtlibError(f"step_fn must return tensors, but returned {type(leaf).__name__} {leaf!r:.40}.")
    return tree_map_only(torch.Tensor, torch.detach, output)
