"""TF-Replicator's programming model: the step of one replica is written once, and the library runs it on all.

    input_fn(replica_id)      what one replica reads
    step_fn(inputs)           what one replica does with it: loss, gradients, optimizer

    between-graph: one process per replica           in-graph: one process holds all replicas
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
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dtlib.comm import AnyCommunicator, as_communicator, types
from dtlib.errors import DtlibError
from dtlib.parallel.replicator.capturing import capture, check_repeatable
from dtlib.parallel.replicator.exchange import MAP_REDUCE_OPS, BetweenGraph, InGraph, all_gather, all_reduce
from dtlib.parallel.replicator.optimizer import ReplicatedOptimizer
from dtlib.parallel.replicator.python_state import changed, python_state
from dtlib.parallel.replicator.rewiring import rewire
from dtlib.parallel.replicator.step_graph import StepGraph

__all__ = ["ReplicatedOptimizer", "Replicator", "StepGraph"]


class Replicator:
    """Runs a step on all replicas.

    Args:
        comm: between-graph replication: every rank of this communicator is a replica, and all call the same methods
            in the same order.
        replicas: in-graph replication: this process holds so many replicas, whose graphs are captured and rewired
            into one. They share one set of parameters, and run one after another on the device of their tensors.

    The same ``input_fn`` and ``step_fn`` give the same results both ways, up to rounding. ``replica_id`` is the number
    of the replica whose step runs, ``replicas`` how many there are.

    What differs from the paper: its in-graph replicas have a device each; here the graph shows what is computed and
    exchanged, and is no faster than one process. Training is synchronous.
    """

    def __init__(self, comm: AnyCommunicator | None = None, replicas: int | None = None):
        if (comm is None) == (replicas is None):
            raise DtlibError(
                "Replicator needs one of the two: comm, a process per replica, or replicas, how many in it."
            )
        if replicas is not None and (not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1):
            raise DtlibError(f"Replicator(replicas={replicas!r}): a whole number from 1 on.")
        self.comm = comm if comm is None else as_communicator(comm)
        self.replicas: int = replicas or self.comm.size  # type: ignore[union-attr]  # there is one of the two
        self.replica_id = self.comm.rank if self.comm else 0
        self._exchange = BetweenGraph(self.comm) if self.comm else InGraph(self.replicas)
        self._optimizers: list[ReplicatedOptimizer] = []
        self._programs: dict[Callable, _Program] = {}  # by step function
        self._last: _Program | None = None

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> ReplicatedOptimizer:
        """An optimizer with ``minimize(loss)``, which averages gradients over replicas before the step.

        Between processes, its parameters get rank 0's values now.
        """
        wrapped = ReplicatedOptimizer(optimizer, self._exchange, len(self._optimizers))
        self._optimizers.append(wrapped)
        if self.comm:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.comm.broadcast(parameter)
        return wrapped

    # Inside step_fn

    def map_reduce(self, value: torch.Tensor | Callable, op: str = "sum") -> torch.Tensor:
        """Combine one tensor of every replica, element by element; gradients flow back to every replica.

        Args:
            value: this replica's tensor, or a function that gives it: ``value(replica_id)``.
            op: ``sum``, ``mean``, ``max`` or ``min``.

        A function can share work out: ``lambda replica_id: total(items[replica_id::replicator.replicas])``.
        """
        tensor = self._mapped(value, "map_reduce")
        if op not in MAP_REDUCE_OPS:
            raise DtlibError(f"map_reduce has no op {op!r}: choose one of {', '.join(MAP_REDUCE_OPS)}.")
        types.combiner(tensor, op, "map_reduce")  # refuses what processes could not combine
        return all_reduce(tensor, op, self._exchange)

    def map_gather(self, value: torch.Tensor | Callable) -> torch.Tensor:
        """Every replica's tensor, one after the other along the first axis; numbers become a vector.

        ``value`` is as in ``map_reduce``, of the same shape on all replicas. Gradients flow back to every replica.
        """
        tensor = self._mapped(value, "map_gather")
        types.check_name(types.dtype_name(tensor.dtype), "map_gather")
        return all_gather(tensor, self.replicas, self._exchange)

    def _mapped(self, value, name):
        if callable(value) and not isinstance(value, torch.Tensor):
            value = value(self.replica_id)
        if not isinstance(value, torch.Tensor):
            raise DtlibError(f"{name} takes a tensor, or a function of replica_id, and got {type(value).__name__}.")
        return value

    # Running

    def run(self, step_fn: Callable, input_fn: Callable, steps: int | None = None) -> object:
        """Run ``step_fn`` on all replicas, step after step.

        Args:
            step_fn: ``step_fn(inputs)`` is one replica's step; it gives a tensor, or tensors in tuples, lists and
                dictionaries, or None. In-graph it is captured when it first runs, for inputs of these shapes, and
                again only if what it reads of Python's world has changed since.
            input_fn: ``input_fn(replica_id)`` gives an iterable of inputs for that replica, or a function that gives
                them one by one. Inputs are tensors, or tuples, lists and dictionaries of them.
            steps: how many; without it, until the first replica has no more inputs.

        Returns:
            What ``step_fn`` gave, each tensor stacked as ``[steps, replicas, ...]``; the same on every process.

        Raises:
            DtlibError: if inputs end before ``steps``, and for what cannot be captured, with its line.
        """
        here = [self.replica_id] if self.comm else range(self.replicas)
        sources = [_inputs_of(input_fn, replica) for replica in here]
        results: list[list] = []
        while steps is None or len(results) < steps:
            inputs = self._next_inputs(sources, steps, len(results))
            if inputs is None:
                break
            outputs = [step_fn(inputs[0])] if self.comm else self._run_graph(step_fn, inputs)
            results.append([tree_map(_copied, _checked_output(output)) for output in outputs])
        return self._stacked(results)

    def _next_inputs(self, sources, steps, done):
        """A list of this process's replicas' inputs, or None once a replica has no more."""
        end = object()
        inputs = [next(source, end) for source in sources]
        has_more = torch.tensor([thing is not end for thing in inputs], dtype=torch.uint8)
        if self.comm:
            has_more = self.comm.all_gather(has_more.new_empty(self.replicas), has_more)
        if has_more.all():
            return inputs
        if steps is not None:
            raise DtlibError(
                f"input_fn({has_more.tolist().index(0)}) gave inputs for {done} of {steps} steps: give more, or leave "
                "out steps, and the run ends with them."
            )
        return None

    def _stacked(self, results):
        if not results:
            raise DtlibError("run has made no step: input_fn gave no inputs, or steps is 0.")
        self._check_alike(results)
        leaves, spec = tree_flatten(results[0][0])
        columns = [[[tree_flatten(output)[0][i] for output in step] for step in results] for i in range(len(leaves))]
        return tree_unflatten([self._stack(column) for column in columns], spec)

    def _check_alike(self, results) -> None:
        """Refuse outputs that differ in more than values, between steps and between replicas; on every process."""
        kinds = [_kind(output) for step in results for output in step]
        here = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
        kinds = [one for pair in self.comm.all_gather_object((kinds[0], here)) for one in pair] if self.comm else kinds
        if other := next((kind for kind in kinds if kind != kinds[0]), None):
            raise DtlibError(
                f"step_fn gave {kinds[0]} and, in another step or on another replica, {other}: give the same each "
                "time, with keys in one order, as results are stacked."
            )

    def _stack(self, column):
        if column[0][0] is None:
            return None
        stacked = torch.stack([torch.stack(step) for step in column])
        if not self.comm:
            return stacked
        everyones = stacked.new_empty(self.replicas, *stacked.shape)
        return self.comm.all_gather(everyones, stacked)[:, :, 0].transpose(0, 1)

    # In-graph

    def _run_graph(self, step_fn, inputs):
        program = self._programs.get(step_fn)
        if program is None or changed(program.state, python_state(step_fn)):
            program = self._programs[step_fn] = _Program(self, step_fn, inputs)
        self._last = program
        return program(inputs)

    def graph(self) -> StepGraph:
        """The graph that ran last: ``print`` it."""
        if self._last is None:
            why = "a process per replica has none" if self.comm else "nothing has run yet"
            raise DtlibError(f"graph() shows what Replicator(replicas=...) has captured and rewired: {why}.")
        return self._last.graph


class _Program:
    """A step function's graph of all replicas, and how its inputs and outputs are packed."""

    def __init__(self, replicator, step_fn, inputs):
        self.packed = []  # a replica's outputs: how they are packed
        self.shapes = [_shapes(thing, replica) for replica, thing in enumerate(inputs)]
        graphs = []
        try:
            for replica, thing in enumerate(inputs):
                replicator.replica_id = replica
                tensors, spec = tree_flatten(thing)

                def traced(*tensors, spec=spec):
                    outputs, self.last_spec = tree_flatten(_checked_output(step_fn(tree_unflatten(tensors, spec))))
                    return outputs

                graph, self.state = capture(step_fn, tensors, traced)
                if replica == 0:
                    check_repeatable(graph, traced, tensors)
                graphs.append(graph)
                self.packed.append(self.last_spec)
        finally:
            replicator.replica_id = 0
        self.graph = StepGraph(rewire(graphs, replicator._optimizers), replicator.replicas)

    def __call__(self, inputs):
        for replica, (thing, captured) in enumerate(zip(inputs, self.shapes, strict=True)):
            if (shapes := _shapes(thing, replica)) != captured:
                raise DtlibError(
                    f"step_fn was captured for inputs {_told(captured)} of replica {replica} and got {_told(shapes)}: "
                    "keep shapes fixed (drop or pad the last batch), or use Replicator(comm)."
                )
        outputs = self.graph(*[tensor for thing in inputs for tensor in tree_flatten(thing)[0]])
        return [tree_unflatten(mine, spec) for mine, spec in zip(outputs, self.packed, strict=True)]


def _shapes(inputs, replica):
    tensors, spec = tree_flatten(inputs)
    for thing in tensors:
        if not isinstance(thing, torch.Tensor):
            raise DtlibError(
                f"input_fn({replica}) gave {thing!r:.40}, which a graph would keep for ever: give tensors, for "
                f"instance torch.tensor({thing!r:.40})."
            )
    return [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors], spec


def _told(shapes):
    return ", ".join(f"{shape} {dtype}".replace("torch.", "") for shape, dtype, _ in shapes[0]) or "none"


def _inputs_of(input_fn, replica):
    given = input_fn(replica)
    return iter(given, object()) if callable(given) else iter(given)


def _copied(leaf):
    """What later steps do not change, as they would a parameter or a statistic."""
    return leaf if leaf is None else leaf.clone()


def _kind(output) -> str:
    """How an output is packed, in words: ``{'loss': (3,) float64}``."""
    told = tree_map(
        lambda leaf: leaf if leaf is None else f"{tuple(leaf.shape)} {leaf.dtype}".replace("torch.", ""), output
    )
    return str(told)


def _checked_output(output):
    """Outputs without their gradients; the loss is done with."""
    leaves, spec = tree_flatten(output)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise DtlibError(f"step_fn gives tensors, and gave {type(leaf).__name__} {leaf!r:.40}.")
    return tree_unflatten([leaf if leaf is None else leaf.detach() for leaf in leaves], spec)
