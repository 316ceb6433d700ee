"""What each ZeRO stage makes of a model and its optimizer, behind one interface for the engine.

    stage                 dtlib                       runtime="torch"
    0                     DataParallel                DistributedDataParallel
    1                     ZeroOptimizer(stage=1)      DistributedDataParallel, ZeroRedundancyOptimizer
    2                     ZeroOptimizer(stage=2)      FSDP2, reshard_after_forward=False
    3                     fully_shard                 FSDP2, reshard_after_forward=True

dtlib's classes use bucket size, offload and overlap from the config; torch's classes use torch's own settings.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import MEBIBYTE
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.reducer import RootBuffers
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.argument_checks import check_elementwise
from dtlib.parallel.zero.sharded import fully_shard, units_of
from dtlib.training.config import ZeroOptimization

Trained: TypeAlias = Callable[[], list[Tensor]]


class Replicated:
    """Stage 0: every rank has all parameters, gradients and optimizer states.

    Args:
        model, comm: as for ``initialize``.
        trained: a function that returns the parameters to train; it is called after ``wrap``, which may replace them.
        make_optimizer: a function from parameters to a torch optimizer.
        zero: the config's section ``zero_optimization``.
    """

    # The communicator over which gradients are sharded; None if each rank has full gradients.
    shards_on: Communicator | None = None
    # Broadcasts rank 0's buffers. None with DataParallel, which broadcasts buffers itself.
    buffers: RootBuffers | None = None

    def __init__(
        self, model: nn.Module, comm: Communicator, trained: Trained, make_optimizer: Callable, zero: ZeroOptimization
    ):
        self.forward = self.wrap(model, comm, zero)
        self.no_sync = getattr(self.forward, "no_sync", nullcontext)
        self.masters = MasterWeights(trained())
        self.optimizer = self.distribute(make_optimizer(self.masters.masters), comm)

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        """Return the module on which the engine calls forward."""
        return DataParallel(model, comm, **_buckets_and_progress(model, zero))

    def distribute(self, optimizer: Optimizer, comm: Communicator) -> Optimizer:
        """Return the optimizer that shards the states of ``optimizer``; here the same one."""
        return optimizer

    def reduce(self, scale: float) -> list:
        """Finish averaging and unscaling; return the gradients as the optimizer will use them, before clipping."""
        if self.buffers is not None:
            self.buffers.stale = True
        self.masters.take_gradients(scale)
        return [_local(master.grad) for master in self.masters.masters]

    def step(self) -> None:
        """Step the optimizer on master weights, and copy them to the parameters."""
        self.optimizer.step()
        self.masters.copy_to_parameters()


class Alone(Replicated):
    """Stage 0 with a single pipeline: no averaging.

    No hooks are installed, so that a schedule may split backward passes (zero bubble).
    """

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        return model


class TorchReplicated(Replicated):
    """Stage 0 with torch's ``DistributedDataParallel``."""

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        from dtlib.training.torch_runtime import data_parallel

        return data_parallel(model, comm)


class TorchStage1(TorchReplicated):
    """Stage 1 with torch's ``ZeroRedundancyOptimizer``."""

    def distribute(self, optimizer: Optimizer, comm: Communicator) -> Optimizer:
        from dtlib.training.torch_runtime import zero_redundancy

        return zero_redundancy(optimizer.param_groups, type(optimizer), _settings_of(optimizer), comm)


class Zero(Replicated):
    """Stages 1 and 2: optimizer states are sharded, and at stage 2 gradients too."""

    optimizer: ZeroOptimizer
    buffers: RootBuffers

    def __init__(
        self, model: nn.Module, comm: Communicator, trained: Trained, make_optimizer: Callable, zero: ZeroOptimization
    ):
        _broadcast(model, comm)
        self.buffers = _broadcast_buffers(model, comm)
        parameters = trained()
        # Only the class and the groups of this optimizer are used.
        plain = make_optimizer(parameters)
        options = {**_buckets_and_progress(model, zero), "offload": zero.offload_optimizer.device == "cpu"}
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [  # a group may have no parameters
            {**group, "param_names": [names.get(p, "a parameter") for p in group["params"]]}
            for group in plain.param_groups
        ]
        self.optimizer = ZeroOptimizer(groups, type(plain), comm, zero.stage, **options, **_settings_of(plain))
        self.forward, self.no_sync, self.shards_on = model, nullcontext, comm
        self.masters = self.optimizer.masters
        optimizer = self.optimizer

        # A closure, not a bound method: a deep copy of the model would copy the optimizer with the method's object.
        def count(module, inputs):
            if module is model and module.training and torch.is_grad_enabled():
                optimizer.forwards += 1

        model.register_forward_pre_hook(count)

    def reduce(self, scale: float) -> list:
        self.buffers.stale = True
        self.optimizer.reduce_gradients(scale)
        return [master.grad for master in self.masters.masters]

    def step(self) -> None:
        self.optimizer.step()


class Sharded(Replicated):
    """Stage 3: parameters are sharded too."""

    def __init__(
        self, model: nn.Module, comm: Communicator, trained: Trained, make_optimizer: Callable, zero: ZeroOptimization
    ):
        self.forward, self.no_sync, self.shards_on = self.wrap(model, comm, zero), nullcontext, comm
        self.buffers = _broadcast_buffers(model, comm)
        offload = zero.offload_optimizer.device == "cpu"
        self.masters = MasterWeights(trained(), "cpu" if offload else None)
        self.optimizer = make_optimizer(self.masters.masters)
        check_elementwise(type(self.optimizer), "ZeRO")

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        progress = _buckets_and_progress(model, zero)["progress"]
        for module in [*units_of(model), model]:
            fully_shard(module, comm, progress=progress)
        return model


class TorchSharded(Sharded):
    """Stages 2 and 3 with torch's FSDP2."""

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        from dtlib.training.torch_runtime import shard_fully

        if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
            raise DtlibError(
                f"{scalars[0]} is a parameter without a dimension, but FSDP2 cuts the first dimension: use the shape "
                "(1,), stage 0 or 1, or runtime='dtlib'."
            )
        _broadcast(model, comm)
        for module in [*units_of(model), model]:
            shard_fully(module, comm, reshard_after_forward=zero.stage == 3)
        return model


STRATEGIES = {
    "dtlib": {0: Replicated, 1: Zero, 2: Zero, 3: Sharded},
    "torch": {0: TorchReplicated, 1: TorchStage1, 2: TorchSharded, 3: TorchSharded},
}


def _buckets_and_progress(model, zero) -> dict:
    """Return the arguments that the config's section sets; other arguments keep their defaults."""
    options = {"progress": None if zero.overlap_comm is None else "thread" if zero.overlap_comm else "inline"}
    if zero.reduce_bucket_size:
        largest = max(parameter.element_size() for parameter in model.parameters())
        options["bucket_cap_mb"] = zero.reduce_bucket_size * largest / MEBIBYTE
    return options


def _settings_of(optimizer) -> dict:
    """Return keyword arguments that make an optimizer of the same class with the same defaults."""
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}


def _broadcast(model, comm) -> None:
    """Copy rank 0's parameters and buffers to all ranks."""
    for tensor in [*model.parameters(), *model.buffers()]:
        comm.broadcast(tensor)


def _broadcast_buffers(model, comm) -> RootBuffers:
    """Broadcast rank 0's buffers before the first forward pass of each step, as DataParallel does."""
    buffers = RootBuffers(model, comm)

    def before_forward(module, inputs):
        if module.training and torch.is_grad_enabled():
            buffers.broadcast()

    model.register_forward_pre_hook(before_forward)
    return buffers


def _local(gradient):
    """Return this rank's shard of a gradient, if torch sharded it."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
