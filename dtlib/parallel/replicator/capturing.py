"""One replica's step as a graph: traced once on tensors without contents, and refused where a graph would lie.

    def step_fn(inputs):                    x --- mm --- tanh --- ... --- loss
        loss = ...                 --->           |                        |
        optimizer.minimize(loss)               weights        all_reduce(gradients) --- apply_gradients
        return loss

A graph does the same operations every time. So whatever makes a step differ from another one, beside the contents of
tensors, is refused with its line: values that become Python's (``if loss > 1``, ``.item()``), random numbers, tensors
and Python state that the step changes by itself.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtlib.comm.call import callers_line
from dtlib.errors import DtlibError
from dtlib.parallel.replicator.python_state import changed, python_state

BETWEEN = "or use Replicator(comm), a process per replica, where it works"
VALUES = f"a graph does not know values: compute with tensors, for instance torch.where, {BETWEEN}"
# What asks a tensor for its value, in Python.
METHODS = {name: VALUES for name in (
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__format__",
    "__contains__",
)}  # fmt: skip
METHODS["backward"] = "gradients are part of the step: call minimize(loss) of replicator.wrap_optimizer(...)"


def refuse(what: str, why: str) -> NoReturn:
    raise DtlibError(f"An in-graph replicator cannot capture {what} in {callers_line()!r}; {why}.")


def capture(step_fn: Callable, tensors: Sequence[torch.Tensor], traced: Callable) -> tuple[fx.GraphModule, dict]:
    """The graph of ``traced(*tensors)``, which calls ``step_fn``.

    Returns:
        The ``GraphModule``, and the state of Python for which it holds.
    """
    before = python_state(step_fn)
    graph = _trace(traced, tensors)
    if name := changed(before, python_state(step_fn)):
        raise DtlibError(
            f"step_fn changes {name}, and a graph would do that once, when it is captured: return it as a tensor and "
            f"keep it outside, {BETWEEN}."
        )
    return graph, before


def check_repeatable(graph: fx.GraphModule, traced: Callable, tensors: Sequence[torch.Tensor]) -> None:
    """Trace a second time: what is not the same then comes from somewhere that a graph does not see."""
    again = _trace(traced, tensors)
    for ours, theirs in zip(graph.graph.nodes, again.graph.nodes, strict=False):
        same = ours.target == theirs.target and str((ours.args, ours.kwargs)) == str((theirs.args, theirs.kwargs))
        if not same or (ours.op == "get_attr" and not _same(getattr(graph, ours.target), getattr(again, ours.target))):
            what = f"{ours.format_node()} became {theirs.format_node()}" if not same else f"the constant {ours.target}"
            raise DtlibError(
                f"step_fn did not do the same when it was captured twice ({what}): pass what changes (random numbers, "
                f"counters, the time) as a tensor from input_fn, {BETWEEN}."
            )
    if len(graph.graph.nodes) != len(again.graph.nodes):
        raise DtlibError(f"step_fn did not do the same number of operations when it was captured twice; {BETWEEN}.")


def _same(a, b):
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True))


def _trace(traced, tensors):
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]

        def watched(*inputs):
            with _NoValues(), _NoSideEffects(inputs), _dynamic_is_refused():
                return traced(*inputs)

        return make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)


@contextmanager
def _dynamic_is_refused():
    try:
        yield
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        raise DtlibError(
            f"An in-graph replicator cannot capture {error.func}, whose result depends on values: {VALUES}."
        ) from None


class _NoValues(TorchFunctionMode):
    """Refuses to turn a tensor into a Python value."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in METHODS and args and isinstance(args[0], torch.Tensor):
            refuse(name, METHODS[name])
        return function(*args, **(kwargs or {}))


class _NoSideEffects(TorchDispatchMode):
    """Refuses random numbers, and writing into tensors that were there before the step."""

    def __init__(self, inputs):
        super().__init__()
        # By storage, as views share it; the reference keeps a number from being given twice.
        self.outside = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "dtlib":
            return function(*args, **kwargs)
        schema = function._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        by_name = {argument.name: argument.default_value for argument in schema.arguments} | given | kwargs
        # Attention draws only if it drops.
        if torch.Tag.nondeterministic_seeded in function.tags and by_name.get("dropout_p") != 0:
            refuse(
                f"{function}, which draws random numbers",
                f"replicas in one process would draw from one generator: draw them in input_fn(replica_id), {BETWEEN}",
            )
        views_outside = False
        for argument in schema.arguments:
            value = by_name[argument.name]
            if isinstance(value, torch.Tensor) and argument.alias_info and self._is_outside(value):
                views_outside = True
                if argument.alias_info.is_write:
                    self._refuse_writing(function)
        if "batch_norm" in str(function) and by_name.get("training") and self._is_outside(by_name.get("running_mean")):
            self._refuse_writing(function)
        result = function(*args, **kwargs)
        if views_outside and isinstance(result, torch.Tensor) and "lift_fresh" not in str(function):
            self.outside[result.untyped_storage()._cdata] = result.untyped_storage()
        return result

    def _is_outside(self, tensor) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        return not isinstance(tensor, fake_tensor.FakeTensor) or tensor.untyped_storage()._cdata in self.outside

    def _refuse_writing(self, function):
        refuse(
            f"{function}, which changes a tensor from outside the step (an input, a parameter, a running statistic)",
            "replicas in one process would all change the same one: compute a new tensor and return it "
            f"(BatchNorm: track_running_stats=False), {BETWEEN}",
        )
