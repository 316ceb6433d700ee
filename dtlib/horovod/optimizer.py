"""An optimizer that reduces gradients over ranks before its step. Counterpart: ``horovod.torch.optimizer``.

backward    a hook for each gradient: the last layer's comes first, and is submitted by name
step        what is missing is submitted, ranks agree, all is reduced, then the step itself
"""

import warnings
from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dtlib.horovod.basics import size
from dtlib.horovod.compression import Compression, Compressor
from dtlib.horovod.operations import Average, Sum, allgather_async, allreduce_async_, check_op, synchronize
from dtlib.horovod.request import HorovodInternalError


class _Distributed(Optimizer):
    """What is put before the class of the optimizer: each method is this one's, then the optimizer's own."""

    def _distribute(self, named_parameters, compression: type[Compressor], passes: int, op: int, predivide: float,
                    sparse_as_dense: bool):  # fmt: skip
        self.compression, self.backward_passes_per_step, self.op = compression, passes, op
        self.gradient_predivide_factor, self.sparse_as_dense = predivide, sparse_as_dense
        self._parameter_names = self._checked_names(named_parameters)
        self._delay: dict[torch.Tensor, int] = {}  # of a parameter: backward passes until its gradient is submitted
        self._travelling: dict[torch.Tensor, tuple] = {}  # of a parameter: its gradient, what waits for the reduced one
        self._synchronized, self._should_synchronize = False, True
        self._hooked: dict[torch.Tensor, RemovableHandle] = {}
        self._hook_parameters()

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _checked_names(self, named_parameters) -> dict:
        if named_parameters is None:
            return {parameter: f"allreduce.noname.{i}" for i, parameter in enumerate(self._parameters())}
        named_parameters = list(named_parameters)
        if not all(isinstance(one, tuple) for one in named_parameters):
            raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                             "model.named_parameters().")  # fmt: skip
        names = [name for name, _ in named_parameters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {twice}")
        known = {parameter: name for name, parameter in named_parameters}
        if unnamed := [tuple(parameter.shape) for parameter in self._parameters() if parameter not in known]:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: those of shape "
                f"{', '.join(map(str, unnamed))}. Pass model.named_parameters() of the whole model."
            )
        return known

    def _hook_parameters(self) -> None:
        """Called again for those that were frozen, or not there, the last time. One rank alone reduces nothing."""
        for parameter in self._parameters() if size() > 1 else []:
            if parameter.requires_grad and parameter not in self._hooked:
                self._parameter_names.setdefault(parameter, f"allreduce.noname.{len(self._parameter_names)}")
                self._delay[parameter] = self.backward_passes_per_step
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    # Gradients

    def _gradient_is_ready(self, parameter) -> None:
        if self._delay[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._delay[parameter] -= 1
        if not self._delay[parameter]:
            self._submit(parameter)

    def _submit(self, parameter) -> None:
        gathered = parameter.grad.is_sparse and not self.sparse_as_dense
        finish = (self._gather if gathered else self._reduce)(self._parameter_names[parameter], parameter.grad)
        self._travelling[parameter] = parameter.grad, finish

    def _reduce(self, name, gradient):
        """Submit a gradient; the function returned waits for the reduced one, which is sparse if this one is."""
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        short, ctx = self.compression.compress(dense.contiguous())
        # The average is a sum: it is divided by the factor before, and by size over the factor after it.
        factor = self.gradient_predivide_factor
        handle = allreduce_async_(short, None, name, self.op, 1 / factor, factor)
        if not gradient.is_sparse:
            handle.watch(gradient)

        def finish():
            reduced = self.compression.decompress(synchronize(handle), ctx)
            return reduced.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else reduced

        return finish

    def _gather(self, name, gradient):
        """The same for a sparse gradient, by gathering everyone's indices and values."""
        if self.op not in (Average, Sum):
            raise ValueError(f"The gradient of {name!r} is sparse: use op=hvd.Average or sparse_as_dense=True.")
        own = gradient.detach().coalesce()
        indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices")
        values = allgather_async(own.values().contiguous(), f"{name}.values")

        def finish():
            total = torch.sparse_coo_tensor(synchronize(indices).t(), synchronize(values), gradient.shape).coalesce()
            return total / size() if self.op == Average else total

        return finish

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. A parameter without a gradient takes part with zeros, as other ranks
        may have one."""
        self._hook_parameters()
        for parameter in self._hooked:
            if parameter.requires_grad and parameter not in self._travelling:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._submit(parameter)
        travelling = dict(self._travelling)
        self._forget_passes()
        errors = []
        for parameter, (gradient, finish) in travelling.items():
            try:
                self._store(parameter, gradient, finish())
            except (HorovodInternalError, AssertionError) as error:  # the others are on their way all the same
                errors.append(error)
        if errors:
            raise errors[0]
        self._synchronized = True

    def _store(self, parameter, gradient, reduced) -> None:
        if parameter.grad is not gradient:
            raise AssertionError(
                f"The gradient of {self._parameter_names[parameter]!r} was set to another between backward() and "
                "step(), while it travelled: set gradients to zero after optimizer.step()."
            )
        if reduced.is_sparse:
            parameter.grad = reduced
        elif gradient.data_ptr() != reduced.data_ptr():
            gradient.copy_(reduced)

    def _forget_passes(self) -> None:
        self._travelling.clear()
        self._delay = dict.fromkeys(self._delay, self.backward_passes_per_step)

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
        """Reduce, then step. With a ``closure``, which computes gradients within the step, reduce after it."""
        inner = closure
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice.",
                    stacklevel=2,
                )
            if closure is None:
                self.synchronize()
            else:

                def inner():
                    loss = closure()
                    self.synchronize()
                    return loss

        result = super().step(inner)
        self._synchronized = False
        return result

    def zero_grad(self, *args, **kwargs):
        if any(delay != self.backward_passes_per_step for delay in self._delay.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        return super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = _whole_number(passes)
        self._delay = dict.fromkeys(self._delay, passes)

    def load_state_dict(self, *args, **kwargs):
        self._forget_passes()
        self._synchronized, self._should_synchronize = False, True
        groups = self.param_groups
        super().load_state_dict(*args, **kwargs)
        # The same dictionaries as before: a scheduler that was made before this optimizer sets their learning rates.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups


def DistributedOptimizer(optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
                         compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1,
                         op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                         groups: object = None, sparse_as_dense: bool = False) -> _Distributed:  # fmt: skip
    """An optimizer of the same class that averages gradients over ranks before each step.

    Args:
        optimizer: a torch optimizer. State and parameter groups are shared with it: use only the new one.
        named_parameters: ``model.named_parameters()``; names match gradients between ranks.
        compression: ``Compression.fp16`` lets gradients travel in 16 bits.
        backward_passes_per_step: how many backward passes add up before gradients are reduced.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        gradient_predivide_factor: gradients are divided by it before the sum, and by size over it afterwards; only
            for ``Average``. For 16 bits, where a sum may overflow.
        num_groups, groups: without effect: gradients that have come on all ranks travel together anyway.
        sparse_as_dense: sparse gradients travel as dense ones, and are sparse again afterwards; else everyone's
            indices and values are gathered.

    Unlike Horovod's it leaves ``p.grad`` None until the first backward pass: zeros would make a sparse gradient dense.

    The step waits for all gradients; to change them before it, as clipping and a GradScaler do (whose changes to
    gradients on their way are not noticed)::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Raises:
        ValueError: for names that do not name each parameter once, a predivide factor with another ``op``, LBFGS.
        AssertionError: from ``backward()`` after more passes than agreed; from ``zero_grad()`` while gradients travel.
        HorovodInternalError: from ``step()`` where gradients were changed while they travelled.
    """
    check_op(op, "DistributedOptimizer")
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is one already; wrap the torch optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("DistributedOptimizer: LBFGS computes as many gradients as each rank's own loss asks for, so "
                         "ranks would come apart: use SGD or Adam.")  # fmt: skip
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r} must be > 0")
    kind = type(optimizer.__class__.__name__, (_Distributed, optimizer.__class__), {})
    distributed: _Distributed = object.__new__(kind)
    # A scheduler made before has wrapped the old one's step; ours is a method.
    distributed.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    passes, factor = _whole_number(backward_passes_per_step), gradient_predivide_factor
    distributed._distribute(named_parameters, compression, passes, op, factor, sparse_as_dense)
    return distributed


def _whole_number(passes) -> int:
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, a whole number, and is {passes!r:.40}")
    return passes
