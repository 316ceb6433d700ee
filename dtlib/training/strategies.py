"""The forms that the stages of ZeRO give a model and its optimizer, alike to the engine.

    stage                 dtlib                       runtime="torch"
    0                     DataParallel                DistributedDataParallel
    1                     ZeroOptimizer(stage=1)      DistributedDataParallel, ZeroRedundancyOptimizer
    2                     ZeroOptimizer(stage=2)      FSDP2, reshard_after_forward=False
    3                     fully_shard                 FSDP2, reshard_after_forward=True

The engine has bucket sizes, offload and overlap from the config for dtlib's; torch's have their own.
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
from dtlib.parallel.zero.arguments import check_elementwise
from dtlib.parallel.zero.sharded import fully_shard, units_of
from dtlib.training.config import ZeroOptimization

Trained: TypeAlias = Callable[[], list[Tensor]]


class Replicated:
    """Stage 0: every rank has everything.

    Args:
        model, comm: as for ``initialize``.
        trained: a function that gives the parameters to train, whatever has become of them.
        make_optimizer: a function from parameters to a torch optimizer.
        zero: the config's section.
    """

    shards_on: Communicator | None = None  # the communicator over whose ranks gradients are cut up, where they are
    buffers: RootBuffers | None = None  # where DataParallel does not look after them

    def __init__(
        self, model: nn.Module, comm: Communicator, trained: Trained, make_optimizer: Callable, zero: ZeroOptimization
    ):
        self.forward = self.wrap(model, comm, zero)
        self.no_sync = getattr(self.forward, "no_sync", nullcontext)
        self.masters = MasterWeights(trained())
        self.optimizer = self.distribute(make_optimizer(self.masters.masters), comm)

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        return DataParallel(model, comm, **_buckets_and_progress(model, zero))

    def distribute(self, optimizer: Optimizer, comm: Communicator) -> Optimizer:
        return optimizer

    def reduce(self, scale: float) -> list:
        """Bring the gradients that the optimizer will see to their final values but for clipping; returns them."""
        if self.buffers is not None:
            self.buffers.stale = True
        self.masters.take_gradients(scale)
        return [_local(master.grad) for master in self.masters.masters]

    def step(self) -> None:
        self.optimizer.step()
        self.masters.give_values()


class Alone(Replicated):
    """Stage 0 of a pipeline that is the only one: nothing to average, and no hooks, so that a schedule may split
    backward passes."""

    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        return model


class TorchReplicated(Replicated):
    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        from dtlib.training.torch_runtime import data_parallel

        return data_parallel(model, comm)


class TorchStage1(TorchReplicated):
    def distribute(self, optimizer: Optimizer, comm: Communicator) -> Optimizer:
        from dtlib.training.torch_runtime import zero_redundancy

        return zero_redundancy(optimizer.param_groups, type(optimizer), _settings_of(optimizer), comm)


class Zero(Replicated):
    """Stages 1 and 2: the optimizer is shared out, at stage 2 with the gradients."""

    optimizer: ZeroOptimizer
    buffers: RootBuffers

    def __init__(
        self, model: nn.Module, comm: Communicator, trained: Trained, make_optimizer: Callable, zero: ZeroOptimization
    ):
        _broadcast(model, comm)
        self.buffers = _broadcast_buffers(model, comm)
        parameters = trained()
        plain = make_optimizer(parameters)  # for its class and its groups
        options = {**_buckets_and_progress(model, zero), "offload": zero.offload_optimizer.device == "cpu"}
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [  # of which some may be empty
            {**group, "param_names": [names.get(p, "a parameter") for p in group["params"]]}
            for group in plain.param_groups
        ]
        self.optimizer = ZeroOptimizer(groups, type(plain), comm, zero.stage, **options, **_settings_of(plain))
        self.forward, self.no_sync, self.shards_on = model, nullcontext, comm
        self.masters = self.optimizer.masters
        optimizer = self.optimizer

        def count(module, inputs):  # a function, as a copy of the model must not copy the optimizer
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
    """Stage 3: parameters, too."""

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
    def wrap(self, model: nn.Module, comm: Communicator, zero: ZeroOptimization) -> nn.Module:
        from dtlib.training.torch_runtime import shard_fully

        if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
            raise DtlibError(
                f"{scalars[0]} is a parameter without a dimension, and FSDP2 cuts the first one: give it the shape "
                "(1,), or take stage 0 or 1, or runtime='dtlib'."
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
    """Arguments that the config's section asks for; what it does not mention stays as it is by default."""
    options = {"progress": None if zero.overlap_comm is None else "thread" if zero.overlap_comm else "inline"}
    if zero.reduce_bucket_size:
        largest = max(parameter.element_size() for parameter in model.parameters())
        options["bucket_cap_mb"] = zero.reduce_bucket_size * largest / MEBIBYTE
    return options


def _settings_of(optimizer) -> dict:
    """The arguments with which an optimizer of the same class behaves the same."""
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}


def _broadcast(model, comm) -> None:
    """Rank 0's values for all."""
    for tensor in [*model.parameters(), *model.buffers()]:
        comm.broadcast(tensor)


def _broadcast_buffers(model, comm) -> RootBuffers:
    """Rank 0's buffers before the first forward pass of each step, as DataParallel does it."""
    buffers = RootBuffers(model, comm)

    def before_forward(module, inputs):
        if module.training and torch.is_grad_enabled():
            buffers.broadcast()

    model.register_forward_pre_hook(before_forward)
    return buffers


def _local(gradient):
    """This rank's shard of a gradient that torch has sharded."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
