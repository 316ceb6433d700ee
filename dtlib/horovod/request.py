"""What ranks tell each other of a tensor, and what is wrong where they tell different things."""

from dataclasses import dataclass

from dtlib.errors import DtlibError


class HorovodInternalError(DtlibError, RuntimeError):
    """A collective that could not be executed. Horovod's exception of this name is a RuntimeError too."""


class DuplicateName(DtlibError, ValueError):
    """A name was submitted again before the first tensor of this name was done."""


@dataclass(frozen=True)
class Request:
    """What ranks tell each other of a tensor: ``kind`` is allreduce, allgather, broadcast or join."""

    kind: str
    name: str
    dtype: str = ""
    shape: tuple = ()
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0

    @classmethod
    def read(cls, fields: list) -> "Request":
        kind, name, dtype, shape, *others = fields
        return cls(kind, name, dtype, tuple(shape), *others)

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.name}"

    @property
    def way(self) -> tuple:
        """Tensors that are alike in this can travel in one buffer."""
        return self.kind, self.dtype, self.op, self.root, self.prescale, self.postscale

    @property
    def common(self) -> tuple:
        """What has to be the same on all ranks."""
        return *self.way, len(self.shape), self.shape[1:] if self.kind == "allgather" else self.shape

    def __str__(self) -> str:
        detail = f", {self.op}" if self.op else f", root_rank={self.root}" if self.kind == "broadcast" else ""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        scales = "".join(f", {name}={value:g}" for name, value in factors.items() if value != 1)
        return f"{self.shape} {self.dtype}{detail}{scales}"


def disagreement(asked: dict[int, Request]) -> str | None:
    """Who submits what under one name, if that is not the same."""
    sides: dict[tuple, list[tuple[int, Request]]] = {}
    for rank, request in sorted(asked.items()):
        sides.setdefault(request.common, []).append((rank, request))
    if len(sides) == 1:
        return None
    request = asked[min(asked)]
    said = [f"{ranks_of([rank for rank, _ in side])} submitted {side[0][1]}" for side in sides.values()]
    return f"{request.kind} {request.name!r} differs between ranks: {'; '.join(said)}. Submit the same on all ranks."


def ranks_of(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"
