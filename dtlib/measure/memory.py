"""``dtlib.memory()``: the memory of training on this rank in bytes, counted from the storages.

    with dtlib.memory(model, optimizer) as m:
        loss_of(model, batch).backward()      m.activations: the most that autograd saved at any time
        optimizer.step()                      m.gradients: counted when the optimizer's step begins
    print(m.with_formula(stage=2))            the other lines, counted at the end, and the closed formula

Every byte is counted once, in the first line of the report that claims it. A view claims its bytes of a flat buffer;
bytes of the buffer that no tensor claims are padding:

    flat buffer   [ w1 w1 w1 w1 b1 | b1 w2 w2 w2 .. ]
    claimed        parameters, or gradients      padding

Objects that allocate buffers report them through a method ``tensors_by_kind()`` (buffers.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.local_gradient import is_freed
from dtlib.gradients.shard_info import info_of
from dtlib.measure.activations import Activations
from dtlib.measure.buffers import tensors_by_kind
from dtlib.measure.live import Live
from dtlib.measure.storages import Storages, storage_key
from dtlib.theory.zero import SCHEMES, Scheme, zero_bytes

LINES = (
    "parameters", "buffers", "gradients", "master_weights", "optimizer_states", "step_counters", "padding",
    "communication", "activations", "peak",
)  # fmt: skip


class Engine(Protocol):
    """The interface of an engine, which ``dtlib.initialize`` returns."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer


def memory(model: torch.nn.Module | Engine, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count a model's memory on this rank while a block runs: ``with dtlib.memory(model, optimizer) as m: ...``

    Args:
        model: a module, with or without ``DataParallel`` or ``fully_shard``, or the engine of ``dtlib.initialize``.
        optimizer: an optimizer of torch or a ``ZeroOptimizer``; by default an engine's own optimizer.

    Gradients are counted when the optimizer's step begins, and when the block calls ``m.sample()``; the result is the
    largest count. With the communicator of ``dtlib.comm.solo``, memory is counted as on that rank, and marked as
    simulated.

    Counterparts: DeepSpeed's ``estimate_zero2_model_states_mem_needs``, which uses a formula and does not count;
    ``torch.distributed._tools.mem_tracker.MemTracker``.
    """
    return Memory(model, optimizer)


class Memory:
    """The context manager that ``memory`` returns. All results are exact numbers of bytes:

    * ``parameters``: including frozen ones;
    * ``buffers``: of the modules;
    * ``gradients``;
    * ``master_weights``: tensors that the optimizer updates instead of 16-bit parameters;
    * ``optimizer_states``: tensors with one element per trained element;
    * ``step_counters``: numbers that the optimizer has once per tensor;
    * ``padding``: of flat buffers;
    * ``communication``: message buffers, gathered parameters, and scratch buffers of a communicator (not ``solo``);
    * ``activations``: tensors that autograd saved for the backward pass, without the lines above. With activation
      checkpointing these are the stored tensors only;
    * ``total``: all lines except activations and peak;
    * ``peak``: the largest number of live bytes at any time: the lines above when the block began, and all that this
      thread allocated in the block. Batches from before the block are not included.

    ``live`` (live.py) counts the peak: ``m.live.now`` is the number at any moment, and ``m.live.by_line()`` lists the
    lines that allocated the memory.

    Inside the block autograd does not detect in-place changes of saved tensors.
    """

    _running = False  # only one at a time, because autograd calls only the innermost hooks for saved tensors

    def __init__(self, model: torch.nn.Module | Engine, optimizer: torch.optim.Optimizer | None = None):
        self._engine: Any = model if hasattr(model, "module") and not isinstance(model, torch.nn.Module) else None
        self._model: Any = model if self._engine is None else model.module
        self._optimizer: Any = optimizer if self._engine is None else optimizer or model.optimizer
        self.sampled: dict[str, int] = {}  # line -> the largest count of any ``sample``
        self._kept = Activations()
        self._formula: dict[str, int] | None = None

    def __enter__(self) -> Memory:
        if Memory._running:
            raise DtlibError("Another dtlib.memory() is active: end it first.")
        comms = self._tensors_by_kind()["communicators"]
        self.simulated = any(getattr(comm, "simulated", False) for comm in comms)
        self.ranks = max((comm.size for comm in comms), default=1)
        self.rank = next((comm.rank for comm in comms if comm.size == self.ranks), 0)
        with ExitStack() as hooks:  # removes the hooks again if an error occurs below
            hooks.enter_context(self._kept)
            hooks.callback(self._model.register_forward_pre_hook(self._look_at_storages, prepend=True).remove)
            if hasattr(self._engine, "before_step_hooks"):
                self._engine.before_step_hooks.append(self.sample)
                hooks.callback(self._engine.before_step_hooks.remove, self.sample)
            elif self._optimizer is not None:
                hooks.callback(self._optimizer.register_step_pre_hook(self.sample).remove)
            self._look_at_storages()
            storages = Storages()
            self._counted(storages)
            self.live = hooks.enter_context(Live(*storages.tensors.values()))
            del storages  # it has references to the tensors, so it would keep their memory alive
            Memory._running = True
            hooks.callback(setattr, Memory, "_running", False)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, kind: object, problem: object, traceback: object) -> None:
        self._hooks.close()
        if kind is None:
            self._count_at_the_end()

    def sample(self, *_: object) -> None:
        """Count gradients and communication buffers now; the report has the largest count."""
        for name, count in self._counted().items():
            self.sampled[name] = max(count, self.sampled.get(name, 0))

    def _count_at_the_end(self) -> None:
        at_the_end = self._counted()
        # Gradients may be freed by the end of the block, so use the samples from before the optimizer's step.
        sampled = self.sampled or at_the_end
        for name in ("gradients", "gradient_padding"):
            at_the_end[name] = sampled[name]
        at_the_end["communication"] = max(at_the_end["communication"], sampled["communication"])
        at_the_end["padding"] += at_the_end.pop("gradient_padding")
        counted = {**at_the_end, "activations": self._kept.most, "peak": self.live.peak}
        self.lines = {name: counted[name] for name in LINES}
        self.__dict__.update(self.lines)
        self.total = sum(at_the_end.values())

    # Counting

    def _counted(self, storages: Storages | None = None) -> dict[str, int]:
        # The order matters: a byte belongs to the first line that claims it.
        storages = storages or Storages()
        owned, trained = self._tensors_by_kind(), self._parameters()
        updated = [p for one in self._optimizers() for group in one.param_groups for p in group["params"]]
        updated += owned["masters"]
        lines = {"communication": storages.claim(owned["communication"])}
        lines["parameters"] = storages.claim([*trained, *owned["parameters"]])
        lines["buffers"] = storages.claim(self._model.buffers())
        lines["master_weights"] = storages.claim(updated)
        states = [(key, state) for states in self._states() for key, state in states.items()]
        counters = [state for key, state in states if key == "step" or state.dim() == 0]
        lines["step_counters"] = storages.claim(counters)
        lines["optimizer_states"] = storages.claim(state for _, state in states)
        lines["padding"] = storages.rest([*trained, *updated, *owned["parameters"], *(s for _, s in states)])
        gradients = [p.grad for p in [*trained, *updated] if not is_freed(p.grad)] + owned["gradients"]
        lines["gradients"] = storages.claim(gradients)
        lines["gradient_padding"] = storages.rest(gradients)
        return lines

    def _tensors_by_kind(self) -> dict[str, list]:
        return tensors_by_kind(*(obj for obj in (self._engine, self._model, self._optimizer) if obj is not None))

    def _parameters(self) -> list[torch.Tensor]:
        return list(self._model.parameters())

    def _optimizers(self):
        local = getattr(self._optimizer, "optim", None)  # a ZeroOptimizer's local optimizer, which has the states
        return [one for one in (self._optimizer, local) if one is not None]

    def _states(self):
        for optimizer in self._optimizers():
            for state in optimizer.state.values():
                yield {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def _look_at_storages(self, *_) -> None:
        owned = self._tensors_by_kind()
        kept = [tensor for kind in ("parameters", "gradients", "communication") for tensor in owned[kind]]
        self._kept.others = {storage_key(tensor) for tensor in [*self._parameters(), *self._model.buffers(), *kept]}

    # The report

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Numbers of elements of the whole model: trained elements per flat buffer, and frozen elements per buffer.

        Parameters outside flat buffers are one number.
        """
        flats = {storage_key(tensor) for tensor in self._tensors_by_kind()["parameters"]}
        trained: dict[int | None, int] = {}
        frozen: dict[int | None, int] = {}
        for parameter in self._parameters():
            place = storage_key(parameter) if storage_key(parameter) in flats else None
            slice_ = info_of(parameter).slice
            size = torch.Size(slice_.shape).numel() if slice_ is not None else parameter.numel()
            kind = trained if parameter.requires_grad else frozen
            kind[place] = kind.get(place, 0) + size
        return list(trained.values()), list(frozen.values())

    def with_formula(self, stage: int | None = None, ranks: int | None = None, scheme: str | Scheme = "adam") -> Memory:
        """Add a column to the table: the closed formula of a ZeRO stage for this rank (theory/zero.py); return self.

        By default ``stage`` and ``ranks`` are those of the model and its optimizer.
        """
        if stage is None:
            sharded = any(info_of(tensor).slice for tensor in self._tensors_by_kind()["parameters"])
            stage = 3 if sharded else getattr(self._optimizer, "stage", 0)
        ranks = ranks or self.ranks
        trained, frozen = self.sizes
        self._formula = zero_bytes(trained, ranks, stage, scheme, min(self.rank, ranks - 1), frozen)
        name = scheme if isinstance(scheme, str) and scheme in SCHEMES else str(scheme)
        self._formula_of = f"formula: stage {stage}, {ranks} ranks, {name}"
        return self

    def table(self, form: str = "simple") -> str:
        """Return a table with one row per line: bytes, bytes per parameter of the whole model, and perhaps the formula.

        ``form`` is a table format of the package tabulate. The formula is included after ``with_formula()``.
        """
        from tabulate import tabulate

        parameters = max(1, sum(map(sum, self.sizes)))
        headers = [f"rank {self.rank} of {self.ranks}{', simulated' * self.simulated}", "bytes", "per parameter"]
        rows = [
            [name.replace("_", " "), f"{count:,}", f"{count / parameters:.3f}"] for name, count in self.lines.items()
        ]
        if self._formula is not None:
            headers.append(self._formula_of)
            for name, row in zip(self.lines, rows, strict=True):
                row.append(f"{self._formula[name]:,}" if name in self._formula else "")
        sides = ("left", *["right"] * (len(headers) - 1))
        return tabulate(rows, headers, disable_numparse=True, colalign=sides, tablefmt=form)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self):
        return self.table("html")
