"""A model and its optimizer, complete on every rank, and a training step with data parallelism.

    batch of step 7      on 4 ranks  | rank 0 | rank 1 | rank 2 | rank 3 |
    the same batch       on 3 ranks  |  rank 0   |  rank 1  |  rank 2    |

Each step has a fixed batch, and each rank computes a slice of it. The gradient is the mean over the whole batch. So the
number of ranks does not change the result, and training continues after a failure as if no rank had died.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import info_of
from dtlib.recovery.rank_status import RankStatus

OnEvent = Callable[..., object]


def ignore(what: str, **facts: object) -> None:
    """Ignore an event; this is the default for ``on_event``."""


class Replica:
    """A model that all ranks train, each with a complete copy. ``steps`` counts completed steps; ``losses`` has theirs.

    Args:
        model: an ``nn.Module``. Its trained parameters are all float32 or all float64, and each gets a gradient.
        optimizer: an optimizer of torch for parameters of the model.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the samples.
        batch_of: ``batch_of(step)`` returns input and target of the whole batch, the same on all ranks.

    Raises:
        DtlibError: if parameters or states are sharded, because a dead rank's shards would be lost.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., torch.Tensor],
        batch_of: Callable,
    ):  # fmt: skip
        self.model, self.optimizer, self.loss_fn, self.batch_of = model, optimizer, loss_fn, batch_of
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.steps = 0
        self.losses: list[float] = []
        self.status = RankStatus()
        _refuse_shards(model, optimizer)
        if {parameter.dtype for parameter in self.trained.values()} not in ({torch.float32}, {torch.float64}):
            kinds = sorted({str(parameter.dtype) for parameter in self.trained.values()})
            raise DtlibError(f"Replica: trained parameters are {kinds}: make all of them float32, or all float64.")

    def step(self, comm: Communicator) -> None:
        """Train one step on this rank's slice of the batch. If an error ends the step, the replica does not change."""
        began = time.monotonic()
        x, y = self.batch_of(self.steps)
        if len(x) < comm.size:
            raise DtlibError(f"Step {self.steps} has a batch of {len(x)} samples for {comm.size} ranks: take more.")
        mine = slice(len(x) * comm.rank // comm.size, len(x) * (comm.rank + 1) // comm.size)
        # Weight the loss by this rank's part of the batch, so that the sum over ranks is the mean over the batch.
        with self.restore_on_error():
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x[mine]), y[mine]) * len(x[mine]) / len(x)
            loss.backward()
            gradients = [self.gradient(name) for name in self.trained]
            status = self.status.of_this_rank(comm, gradients, time.monotonic() - began)
            flat = torch.cat([part.to(gradients[0].dtype) for part in (loss.detach().flatten(), status, *gradients)])
            # If another rank has died, this all-reduce raises. Nothing has changed yet.
            comm.all_reduce(flat)
            loss, status, gradients = flat.split([1, len(status), len(flat) - 1 - len(status)])
            self.status.check(status, self.steps, comm)
        vector_to_parameters(gradients, [one.grad for one in self.trained.values() if one.grad is not None])
        self.optimizer.step()
        self.steps += 1
        self.losses.append(loss.item())

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of parameter ``name``, flattened; raise an error if it has none."""
        gradient = self.trained[name].grad
        if gradient is None:
            raise DtlibError(
                f"Replica: {name} got no gradient in step {self.steps}: freeze parameters that the loss does not use."
            )
        return gradient.flatten()

    @contextmanager
    def restore_on_error(self) -> Iterator[None]:
        """Restore the model's buffers and the random state if the block raises: a forward pass changes both."""
        buffers, chance = [buffer.clone() for buffer in self.model.buffers()], torch.get_rng_state()
        try:
            yield
        except BaseException:
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            torch.set_rng_state(chance)
            raise

    def state(self) -> dict:
        """Return a copy of all that a step changes, except the random state, which differs between ranks."""
        return copy.deepcopy({
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "steps": self.steps, "losses": self.losses,
        })  # fmt: skip

    def load(self, state: dict) -> None:
        """Restore a state of ``state()``; the argument is copied and not changed."""
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.losses = state["steps"], state["losses"]

    def check_same(self, comm: Communicator) -> None:
        """Raise an error if the models of the ranks differ; all ranks call it."""
        check_same_model(self.trained, comm, "Replica")


def _refuse_shards(model, optimizer) -> None:
    sharded = any(info_of(one).slice or hasattr(one, "placements") for one in model.parameters())
    sharded |= any(hasattr(optimizer, name) for name in ("shard_of", "consolidate_state_dict"))
    if sharded or hasattr(model, "stage_indices"):
        raise DtlibError(
            "Replica needs the whole model and all states on every rank. With shards (ZeRO) and stages (pipelines), a "
            "rank that dies takes its part with it: save with dtlib.checkpoint, and start all ranks again from there "
            "(dtlib.recovery.supervise)."
        )
