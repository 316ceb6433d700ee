"""Checkpoints of an engine: what it saves beside the model and its optimizer, and how it goes on from there."""

import warnings
from functools import partial
from pathlib import Path

from dtlib import checkpoint
from dtlib.errors import DtlibError
from dtlib.training.facts import Facts

COUNTS = ("global_steps", "skipped_steps")
LATEST = "latest"


class Checkpoints(Facts):
    """``save_checkpoint`` and ``load_checkpoint`` of an engine."""

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest: bool = True) -> None:
        """Save all that training needs to go on, on any number of ranks and at any stage (dtlib.checkpoint).

        All ranks call it, after a step.

        Args:
            save_dir: the checkpoint is a folder in it, called ``tag``, by default ``global_step`` and its number.
            client_state: a dictionary that JSON can hold, which ``load_checkpoint`` returns.
            save_latest: note in the file ``latest`` that this is the one to go on from.

        Raises:
            CheckpointError: on all ranks; and DtlibError in the middle of a step, or for a tag that is no name or
                differs between ranks.
        """
        saved = self._saved()
        if self.micro_steps % self.gradient_accumulation_steps():
            raise DtlibError("Checkpoints are saved between steps: call step() for all micro-batches first.")
        tag = _name_of(f"global_step{self.global_steps}" if tag is None else tag, self._everyone)
        client_state = {} if client_state is None else client_state
        if not isinstance(client_state, dict):
            raise DtlibError(f"client_state is {client_state!r:.60}: give a dictionary.")
        others = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        extra = {name: other.state_dict() for name, other in others.items() if hasattr(other, "state_dict")}
        extra["kinds"] = {"scheduler": _kind(self.lr_scheduler), "dynamic": self._scale.dynamic}
        counts = {name: getattr(self, name) for name in COUNTS}
        extra = {"client_state": client_state, "counts": counts, **extra}
        checkpoint.save(self._place(save_dir, tag), extra=extra, **saved)
        if save_latest:
            self._everyone.barrier()  # where stages save by themselves
            checkpoint.point_to(Path(save_dir) / LATEST, tag, self._everyone)

    def load_checkpoint(self, load_dir, tag=None, load_lr_scheduler_states: bool = True):
        """Go on from what ``save_checkpoint`` saved; returns the checkpoint's folder and its ``client_state``.

        All ranks call it. ``tag`` is by default that in the file ``latest``; where there is no such file it warns,
        changes nothing and returns ``None, None``. Gradients of a step that was begun are forgotten. Without
        ``load_lr_scheduler_states`` the scheduler stays as it is, and may be another one.

        Raises:
            CheckpointError, DtlibError: on all ranks.
        """
        saved = self._saved()
        if tag is None and (tag := checkpoint.pointed_to(Path(load_dir) / LATEST, self._everyone)) is None:
            if self.comm.rank == 0:
                warnings.warn(f"{load_dir} has no file {LATEST!r}: nothing was loaded; pass tag=.", stacklevel=2)
            return None, None
        folder = self._place(load_dir, _name_of(tag, self._everyone))
        extra = checkpoint.load(folder, check=partial(self._check_extra, folder, load_lr_scheduler_states), **saved)
        assert isinstance(extra, dict)
        self.zero_grad()
        if load_lr_scheduler_states and self.lr_scheduler is not None and "scheduler" in extra:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        if self._scale.dynamic and extra["kinds"]["dynamic"]:
            self._scale.load_state_dict(extra["loss_scale"])
        if self._loader is not None and "loader" in extra:
            self._loader.load_state_dict(extra["loader"])
        for name in COUNTS:
            setattr(self, name, extra["counts"][name])
        # The number of micro-batches a step may be another one now.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self._batches = self._loader.forever() if self._loader is not None else None
        return str(folder), extra["client_state"]

    def _place(self, folder, tag: str) -> Path:
        """Where the checkpoint of that name is."""
        return Path(folder) / tag

    @property
    def _everyone(self):
        """The ranks that save together."""
        return self.comm

    def _check_extra(self, folder, with_scheduler: bool, extra) -> None:
        if not isinstance(extra, dict) or "counts" not in extra:
            raise DtlibError(f"{folder} was not saved by an engine, so it has no counters: use dtlib.checkpoint.load.")
        there, here = extra["kinds"]["scheduler"], _kind(self.lr_scheduler)
        if with_scheduler and there != here:
            raise DtlibError(
                f"{folder} was saved with {there or 'no scheduler'}, and the engine has {here or 'none'}: make the "
                "same, or pass load_lr_scheduler_states=False."
            )

    def _saved(self) -> dict:
        for module in self.module.modules():
            reshard = getattr(module, "reshard", None)  # of FSDP2, which leaves parameters whole behind a forward pass
            if callable(reshard):
                reshard()
        masters = None if hasattr(self.optimizer, "shard_of") else self._masters
        return {"model": self.module, "optimizer": self.optimizer, "comm": self.comm, "masters": masters}


def _kind(scheduler) -> str | None:
    return None if scheduler is None else type(scheduler).__name__


def _name_of(tag, comm) -> str:
    """A tag as the name of a folder, the same on all ranks."""
    name = str(tag) if isinstance(tag, (str, int)) else ""
    names = comm.all_gather_object(name)
    if len(set(names)) > 1:
        raise DtlibError(f"tag differs between ranks: rank 0 has {names[0]!r}; give the same on all.")
    if name in ("", ".", "..", LATEST) or Path(name).name != name:
        raise DtlibError(f"tag is {tag!r:.60}: give the name of a folder, such as 'global_step100'.")
    return name
