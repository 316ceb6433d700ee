"""Collectives as operators of torch's: what ``CommDebugMode`` counts, the profiler shows, and wrapper tensors handle.

A group of torch's own calls an operator ``c10d::...`` for each collective, whose kernel calls the backend. A group in
Python is called at once, so nobody who looks at operators would know of it:

    all_reduce(x)  ->  Group.allreduce  --------------------------------------------->  communicator
          somebody looks  |                                                                  ^
                          +->  twin.allreduce  ->  c10d::allreduce_  ->  modes, wrappers  ->  kernel

The detour is taken where a dispatch mode or the profiler is on, or a tensor is a wrapper subclass; it costs about a
tenth of a millisecond. The twin is a group of torch's own that has no backend. While we call it, torch's Python
dispatcher is on in this thread, for which the operators have a kernel of ours; groups of others keep theirs.
"""

import functools
import threading
from typing import TypeVar

import torch
from torch import distributed as dist
from torch._C import DispatchKey
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from dtlib.backend.work import joined

T = TypeVar("T", bound=dist.ProcessGroup)
_modes = torch._C._len_torch_dispatch_stack
KEYS = (DispatchKey.CPU, DispatchKey.CUDA, DispatchKey.SparseCPU, DispatchKey.SparseCUDA)

# Methods of a group: the operator that each one calls, and what the profiler calls the backend's part of it, as gloo's.
OPERATORS = {
    "allreduce": ("allreduce_", "all_reduce"),
    "allreduce_coalesced": ("allreduce_coalesced_", "all_reduce"),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_", "reduce"),
    "all_gather_single": ("_allgather_base_", "all_gather"),
    "_allgather_base": ("_allgather_base_", "all_gather"),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", "all_gather"),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", "all_gather"),
    "allgather": ("allgather_", "all_gather"),
    "allgather_coalesced": ("allgather_coalesced_", "all_gather"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "reduce_scatter"),
    "_reduce_scatter_base": ("_reduce_scatter_base_", "reduce_scatter"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter"),
    "gather": ("gather_", "gather"),
    "scatter": ("scatter_", "scatter"),
    "all_to_all_single": ("alltoall_base_", "all_to_all"),
    "alltoall_base": ("alltoall_base_", "all_to_all"),
    "alltoall": ("alltoall_", "all_to_all"),
    "barrier": ("barrier", "barrier"),
    "send": ("send", "send"),
    "recv": ("recv_", "recv"),
    "recv_anysource": ("recv_any_source_", "recvAnySource"),
}


class _Calls(threading.local):
    """Of this thread, the innermost last."""

    def __init__(self):
        self.under_way = []


_calls = _Calls()


def seen_by_torch(cls: type[T]) -> type[T]:
    """Let the collectives of a class of groups take the way by their operators where somebody looks."""
    for name in OPERATORS:
        setattr(cls, name, _seen(name, getattr(cls, name)))
    return cls


def _seen(name, method):
    @functools.wraps(method)
    def call(self, *args, **options):
        if _modes() or _profiler_enabled() or _wrappers_in(args):
            return _Call(self, name, method, args, options).dispatched()
        return method(self, *args, **options)

    return call


def _wrappers_in(args) -> bool:
    """Of lists it looks at the first, as this is asked before every collective."""
    for one in args:
        while type(one) is list and one:
            one = one[0]
        if _is_wrapper(type(one)):  # type: ignore[arg-type]  # a class can be hashed
            return True
    return False


@functools.cache
def _is_wrapper(kind) -> bool:
    return issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter)


class _Call:
    """One call of a group's ``method``: its operator brings the tensors back, as those who look have left them."""

    def __init__(self, group, name, method, args, options):
        self.group, self.name, self.method, self.args, self.options = group, name, method, args, options
        self.twin = _twin_of(group)
        self.works = []  # a wrapper of several tensors calls the operator for each

    def dispatched(self):
        by_key = _operator(OPERATORS[self.name][0])._dispatch_cache
        before = by_key.get(DispatchKey.Python)
        _calls.under_way.append(self)
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C._EnablePythonDispatcher():
                # Modes and wrappers by torch's own kernel: the one in Python, for such operators, knows modes alone.
                by_key[DispatchKey.Python] = DispatchKey.Python
                answer = getattr(self.twin, self.name)(*self.args, **self.options)
        finally:
            _calls.under_way.pop()
            by_key.pop(DispatchKey.Python, None)
            if before is not None:
                by_key[DispatchKey.Python] = before
        if not self.works:  # a mode that computes nothing has answered in our place
            return answer
        return self.works[0] if len(self.works) == 1 else joined(self.works)

    def carry_out(self, *tensors):
        if self.name == "barrier":
            tensors = ()  # its operator has one, so that it knows the device
        with record_function(f"dtlib:{OPERATORS[self.name][1]}"):
            work = self.method(self.group, *tensors, *self.args[len(tensors) :], **self.options)
        self.works.append(work)
        return work.boxed()


def _twin_of(group):
    if group._twin is None:
        group._twin = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
        group._twin._set_group_name(group.group_name)
    return group._twin


@functools.cache
def _operator(name: str):
    """The operator, with a kernel for calls by way of a twin."""
    operator = getattr(torch.ops.c10d, name).default
    place_of_group = [argument.name for argument in operator._schema.arguments].index("process_group")

    def kernel(*args):
        with torch._C._DisablePythonDispatcher():
            call = _calls.under_way[-1] if _calls.under_way else None
            if call is None or dist.ProcessGroup.unbox(args[place_of_group]) is not call.twin:
                return operator(*args)  # somebody else's group
            work = call.carry_out(*args[:place_of_group])
            return work if len(operator._schema.returns) == 1 else (args[0], work)

    for key in KEYS:
        operator.py_impl(key)(kernel)
    return operator
