"""An optimizer that reduces gradients over ranks before its step. Counterpart: ``horovod.torch.optimizer``.

backward    a hook for each gradient: the last layer's comes first, and is submitted by name
step        what is missing is submitted, ranks agree, all is reduced, then the step itself
"""

import warnings
from contextlib import contextmanager
from itertools import count

import torch

from dtlib.horovod.basics import Average, check_op, check_process_set, size
from dtlib.horovod.compression import Compression
from dtlib.horovod.functions import broadcast_object
from dtlib.horovod.operations import sparse_allreduce_async
from dtlib.horovod.reductions import allreduce_async_, grouped_allreduce_async_
from dtlib.horovod.submission import synchronize


class _Distributed:
    """What is put before the class of the optimizer: each method is this one's, then the optimizer's own."""

    def _distribute(self, named_parameters, compression, passes, op, predivide, groups, sparse_as_dense):
        self._compression, self.op, self.backward_passes_per_step = compression, op, passes
        self.gradient_predivide_factor, self.sparse_as_dense = predivide, sparse_as_dense
        self._names = self._checked_names(named_parameters)
        self._delay = dict.fromkeys(self._names, passes)  # backward passes until a gradient is submitted
        self._handles = {}  # parameter or group: handle and what decompresses, or None while passes are missing
        self._synchronized, self._should_synchronize = False, True
        self._hooked = {}
        self._group_of, self._arrived = {}, {}
        if size() > 1:
            self._hook_parameters()
            self._form_groups(groups)

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _checked_names(self, named_parameters) -> dict:
        if named_parameters is None:
            return {parameter: f"allreduce.noname.{i}" for i, parameter in enumerate(self._parameters())}
        named_parameters = list(named_parameters)
        if not all(isinstance(one, tuple) for one in named_parameters):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                "model.named_parameters()."
            )
        names = [name for name, _ in named_parameters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
            )
        known = {parameter: name for name, parameter in named_parameters}
        unnamed = [tuple(parameter.shape) for parameter in self._parameters() if parameter not in known]
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: those of shape "
                f"{', '.join(map(str, unnamed))}. Pass model.named_parameters() of the whole model."
            )
        return known

    def _hook_parameters(self) -> None:
        for parameter in self._parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._gradient_has_come)

    def _form_groups(self, groups) -> None:
        if isinstance(groups, int) and groups:
            # Rank 0's order holds for all: groups must be the same everywhere.
            names = broadcast_object([self._names[parameter] for parameter in self._hooked])
            ordered = sorted(self._hooked, key=lambda parameter: names.index(self._names[parameter]))
            groups = [ordered[len(ordered) * i // groups : len(ordered) * (i + 1) // groups] for i in range(groups)]
        for group in groups or []:
            group = tuple(parameter for parameter in group if parameter in self._hooked)
            self._group_of.update(dict.fromkeys(group, group))
            self._arrived[group] = 0

    # Gradients

    def _gradient_has_come(self, parameter) -> None:
        if self._delay[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._delay[parameter] -= 1
        group = self._group_of.get(parameter)
        if self._delay[parameter]:
            self._handles[parameter] = None
        elif group is None:
            self._handles[parameter] = self._submit(parameter)
        else:
            self._arrived[group] += 1
            self._handles[parameter] = None
            if self._arrived[group] == len(group):
                self._submit_group(group)

    def _submit(self, parameter):
        gradient = parameter.grad
        name = self._names[parameter]
        if gradient.is_sparse:
            if not self.sparse_as_dense:
                return sparse_allreduce_async(gradient, name, self.op), None
            gradient = parameter.grad = gradient.to_dense()
        short, ctx = self._compression.compress(gradient.detach().contiguous())
        return allreduce_async_(short, name=name, op=self.op, **self._scales()), ctx

    def _scales(self) -> dict:
        if self.op != Average:
            return {}
        # The average is a sum: it is divided by the one before, and by size over the other after it.
        factor = self.gradient_predivide_factor
        return {"prescale_factor": 1 / factor, "postscale_factor": factor}

    def _submit_group(self, group) -> None:
        """All gradients of a group together; a group with a sparse gradient goes one by one."""
        for parameter in group:
            self._handles.pop(parameter, None)
        self._arrived[group] = 0
        if any(parameter.grad.is_sparse for parameter in group):
            self._handles.update({parameter: self._submit(parameter) for parameter in group})
            return
        short, ctxs = zip(*(self._compression.compress(p.grad.detach().contiguous()) for p in group), strict=True)
        handle = grouped_allreduce_async_(short, name=self._names[group[0]], op=self.op, **self._scales())
        self._handles[group] = handle, ctxs

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. A parameter without a gradient takes part with zeros, as other ranks
        may have one."""
        submitted = {p for key, handle in self._handles.items() if handle for p in _members(key)}
        missing = [parameter for parameter in self._hooked if parameter not in submitted]
        for parameter in missing:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group in dict.fromkeys(self._group_of.get(parameter, parameter) for parameter in missing):
            if isinstance(group, tuple):
                self._submit_group(group)
            else:
                self._handles[group] = self._submit(group)
        for key, (handle, ctx) in self._handles.items():
            outputs, ctxs = synchronize(handle), ctx
            if not isinstance(key, tuple):
                outputs, ctxs = [outputs], [ctx]
            for parameter, output, ctx in zip(_members(key), outputs, ctxs, strict=True):
                self._delay[parameter] = self.backward_passes_per_step
                self._store(parameter, self._compression.decompress(output, ctx))
        self._handles.clear()
        self._synchronized = True

    @staticmethod
    def _store(parameter, reduced) -> None:
        if reduced.is_sparse:
            parameter.grad = reduced
        elif parameter.grad.data_ptr() != reduced.data_ptr():
            parameter.grad.copy_(reduced)

    # What programs call

    @contextmanager
    def skip_synchronize(self):
        """``step()`` in this context does not reduce: ``synchronize()`` has done it, and gradients were clipped."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice. Write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, *args, **kwargs):
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        return super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._delay = dict.fromkeys(self._delay, passes)

    def load_state_dict(self, *args, **kwargs):
        self._handles.clear()
        self._synchronized, self._should_synchronize = False, True
        self._delay = dict.fromkeys(self._delay, self.backward_passes_per_step)
        return super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        numbers = count(len(self._names))
        for parameter in self._parameters():
            if parameter not in self._names:
                self._names[parameter] = f"allreduce.noname.{next(numbers)}"
                self._delay[parameter] = self.backward_passes_per_step
        if size() > 1:
            self._hook_parameters()


def _members(key) -> tuple:
    return key if isinstance(key, tuple) else (key,)


def DistributedOptimizer(
    optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average,
    gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=None,
):  # fmt: skip
    """An optimizer of the same class that averages gradients over ranks before each step.

    Args:
        optimizer: a torch optimizer. State and parameter groups are shared with it: use only the new one.
        named_parameters: ``model.named_parameters()``; names match gradients between ranks.
        compression: ``Compression.fp16`` lets gradients travel in 16 bits.
        backward_passes_per_step: how many backward passes add up before gradients are reduced.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        gradient_predivide_factor: gradients are divided by it before the sum, and by size over it afterwards; only
            for ``Average``. For 16 bits, where a sum may overflow.
        num_groups: deprecated, use ``groups``.
        groups: a number of groups, or lists of parameters, whose gradients are submitted together.
        sparse_as_dense: make sparse gradients dense before they travel; else everyone's are gathered.

    The step waits for all gradients; to change them before it, as clipping does:

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Raises:
        ValueError: for names that are no tuples, not unique, or do not cover all parameters; for groups that are not
            such; for a predivide factor with another ``op``.
        AssertionError: from ``backward()`` after more passes than agreed; from ``zero_grad()`` while gradients travel.
    """
    check_process_set(process_set, "DistributedOptimizer")
    check_op(op, "DistributedOptimizer")
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is one already; wrap the torch optimizer once.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    kind = type(optimizer.__class__.__name__, (_Distributed, optimizer.__class__), {})
    distributed = kind.__new__(kind)
    # A scheduler made before has wrapped the old one's step; ours is a method.
    distributed.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    distributed._distribute(
        named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups, sparse_as_dense
    )
    return distributed


def _check_groups(groups) -> None:
    if groups is None:
        return
    if isinstance(groups, bool) or not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError("groups should be a positive integer or a list of list of torch.Tensor.")
    seen = set()
    for group in groups if isinstance(groups, list) else []:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if parameter in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(parameter)
