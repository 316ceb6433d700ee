"""What travels between neighbouring stages: activations forward, their gradients backward.

    stage s    header: how many tensors, of which types and shapes,     -->  stage s+1, which makes room
               and how many micro-batches after this one are like it
               the tensors                                              -->
               the tensors of the next one                              -->
               gradients of those that have one                         <--  into tensors like those that were sent

Messages of one edge and one direction come in the order of micro-batches, so a tag for each is enough. Micro-batches
may differ in shape, as a last uneven one does, or texts of different lengths: then another header comes. As long as
they do not, room for the next ones is ready before they are sent.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dtlib.comm import Communicator
from dtlib.comm.waiting import Operation
from dtlib.errors import DtlibError

HEADER = 64  # numbers; enough for six tensors of six dimensions
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
TAGS = 3  # an edge has one for headers, one for activations, one for gradients


def kinds_of(tensors: Iterable[Tensor]) -> tuple:
    """Of each tensor the type, whether it takes a gradient, and the shape."""
    return tuple((tensor.dtype, tensor.requires_grad, tuple(tensor.shape)) for tensor in tensors)


@lru_cache(maxsize=1024)  # most steps are like the one before
def header_of(kinds: tuple, alike: int) -> torch.Tensor:
    """What announces tensors of these kinds, now and in the next ``alike`` micro-batches; int64.

    Raises:
        DtlibError: for a type that does not travel, and for more tensors or dimensions than a header has room for.
    """
    if odd := next((dtype for dtype, *_ in kinds if dtype not in DTYPES), None):
        raise DtlibError(f"A stage gives {odd} to the next one: it may give {', '.join(str(d)[6:] for d in DTYPES)}.")
    numbers = [alike, len(kinds)]
    for dtype, takes_gradient, shape in kinds:
        numbers += [DTYPES.index(dtype), int(takes_gradient), len(shape), *shape]
    if len(numbers) > HEADER:
        raise DtlibError(
            f"A stage gives {len(kinds)} tensors of together {sum(len(shape) for *_, shape in kinds)} dimensions to "
            f"the next one, and their header has room for {HEADER} numbers: join some of them, with torch.stack or cat."
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def read_header(header: torch.Tensor) -> tuple[tuple, int]:
    """The kinds and the number that made a header."""
    numbers = iter(header.tolist())
    alike, count = next(numbers), next(numbers)
    kinds = []
    for _ in range(count):
        dtype, takes_gradient, dimensions = DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        kinds.append((dtype, takes_gradient, tuple(next(numbers) for _ in range(dimensions))))
    return tuple(kinds), alike


class Activations:
    """The receiving end of an edge, forward: micro-batches in their order."""

    def __init__(self, comm: Communicator, source: int, edge: int, device: torch.device):
        self.comm, self.source, self.tag, self.device = comm, source, TAGS * edge, device
        self.alike: list[int] = []  # of each micro-batch that was asked for, how many after it are like it
        self._header: tuple | None = None
        self._kinds: tuple = ()
        self._arriving: dict[int, tuple] = {}
        self._announced = 0  # micro-batches from here on need a header

    def post(self, microbatch: int, wait: bool = False) -> None:
        """Make room for micro-batches up to this one and ask for them, as far as they have been announced, or ``wait``
        for that. In their order, as messages of one tag are matched in the order in which they are asked for."""
        while len(self.alike) <= microbatch:
            if len(self.alike) == self._announced and not self._next_header(wait):
                return
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.device, requires_grad=takes_gradient)
                for dtype, takes_gradient, shape in self._kinds
            ]
            handles = [self.comm.recv(t.detach(), self.source, self.tag + 1, async_op=True) for t in tensors]
            self._arriving[len(self.alike)] = tensors, handles
            self.alike.append(self._announced - len(self.alike) - 1)

    def _next_header(self, wait: bool) -> bool:
        """Ask for it, and read it if it has arrived."""
        if self._header is None:
            header = torch.zeros(HEADER, dtype=torch.int64)
            self._header = header, self.comm.recv(header, self.source, self.tag, async_op=True)
        header, handle = self._header
        if not wait and not handle.done():
            return False
        handle.wait()
        self._kinds, alike = read_header(header)
        self._announced += 1 + alike
        self._header = None
        return True

    def take(self, microbatch: int) -> list[torch.Tensor]:
        self.post(microbatch, wait=True)
        tensors, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return tensors


class NextStage:
    """The sending end of an edge, forward."""

    def __init__(self, comm: Communicator, dest: int, edge: int):
        self.comm, self.dest, self.tag = comm, dest, TAGS * edge
        self._kinds: tuple | None = None
        self._alike = 0

    def send(self, tensors: Sequence[Tensor], alike: int) -> list[Operation]:
        """Send a micro-batch on, of which the inputs were like those of the next ``alike``; returns handles.

        Raises:
            DtlibError: for tensors of other shapes than those of a micro-batch whose inputs had the same.
        """
        kinds, handles = kinds_of(tensors), []
        if self._alike:
            self._alike -= 1
            if kinds != self._kinds:
                before, now = ([shape for *_, shape in each] for each in (self._kinds or (), kinds))
                raise DtlibError(
                    f"Micro-batches with inputs of equal shapes gave activations of shapes {before} and then {now}: "
                    "pad them, because the next stage has allocated memory for the first shapes."
                )
        else:
            self._kinds, self._alike = kinds, alike
            handles.append(self.comm.send(header_of(kinds, alike), self.dest, self.tag, async_op=True))
        return handles + [
            self.comm.send(t.detach().contiguous(), self.dest, self.tag + 1, async_op=True) for t in tensors
        ]


class Place(NamedTuple):
    """All that a backward pass needs of a tensor that was sent: its place in autograd's graph, and what its gradient
    looks like. The tensor itself is freed once its message has left."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "Place | None":
        """None for a tensor that takes no gradient."""
        if not tensor.requires_grad:
            return None
        return Place(get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device)

    def full(self, value: float) -> Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=self.device)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Gradients:
    """The receiving end of an edge, backward: into tensors like those that were sent forward."""

    def __init__(self, comm: Communicator, source: int, edge: int):
        self.comm, self.source, self.tag = comm, source, TAGS * edge + 2
        self._arriving: dict[int, tuple] = {}

    def post(self, microbatch: int, sent: Sequence[Place | None]) -> None:
        if microbatch not in self._arriving:
            room = [place.empty() if place else None for place in sent]
            handles = [self.comm.recv(t, self.source, self.tag, async_op=True) for t in room if t is not None]
            self._arriving[microbatch] = room, handles

    def take(self, microbatch: int, sent: Sequence[Place | None]) -> list[Tensor | None]:
        self.post(microbatch, sent)
        room, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return room


def send_gradients(comm: Communicator, dest: int, edge: int, received: Sequence[Tensor]) -> list[Operation]:
    """Send back the gradients of what was received; what was not used has gradients of zero."""
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received if t.requires_grad]
    return [comm.send(gradient.contiguous(), dest, TAGS * edge + 2, async_op=True) for gradient in gradients]


def runs_of(kinds: list) -> list[int]:
    """For each place in a list, how many equal elements follow it: [a, a, a, b] gives [2, 1, 0, 0]."""
    alike = [0] * len(kinds)
    for place in reversed(range(len(kinds) - 1)):
        if kinds[place] == kinds[place + 1]:
            alike[place] = alike[place + 1] + 1
    return alike
