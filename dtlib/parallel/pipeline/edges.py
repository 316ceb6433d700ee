"""What travels between neighbouring stages: activations forward, their gradients backward.

    stage s    header: how many tensors, of which types and shapes     -->  stage s+1, which makes room
               the tensors                                             -->
               gradients of those that have one                        <--  into tensors like those that were sent

Messages of one edge and one direction come in the order of micro-batches, so a tag for each is enough. A header a
micro-batch lets shapes differ between micro-batches: a last uneven one, texts of different lengths.
"""

from functools import lru_cache

import torch

from dtlib.errors import DtlibError

HEADER = 64  # numbers; the longest that is needed for six tensors of eight dimensions
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
TAGS = 3  # an edge has one for headers, one for activations, one for gradients


def header_of(tensors) -> torch.Tensor:
    """What ``room_for`` needs to know of tensors; int64.

    Raises:
        DtlibError: for a type that does not travel, and for more tensors or dimensions than a header has room for.
    """
    return _header(tuple((t.dtype, t.requires_grad, tuple(t.shape)) for t in tensors))


@lru_cache(maxsize=1024)  # most micro-batches are like the one before
def _header(kinds) -> torch.Tensor:
    """Number of tensors; for each its type, whether it takes a gradient, its number of dimensions, and these."""
    if odd := next((dtype for dtype, *_ in kinds if dtype not in DTYPES), None):
        raise DtlibError(f"A stage gives {odd} to the next one: it may give {', '.join(str(d)[6:] for d in DTYPES)}.")
    numbers = [len(kinds)]
    for dtype, takes_gradient, shape in kinds:
        numbers += [DTYPES.index(dtype), int(takes_gradient), len(shape), *shape]
    if len(numbers) > HEADER:
        raise DtlibError(
            f"A stage gives {len(kinds)} tensors of together {sum(len(shape) for *_, shape in kinds)} dimensions to "
            f"the next one, and their header has room for {HEADER} numbers: join some of them, with torch.stack or cat."
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def room_for(header: torch.Tensor, device) -> list[torch.Tensor]:
    """Tensors like those that a header announces."""
    numbers = iter(header.tolist())
    tensors = []
    for _ in range(next(numbers)):
        dtype, takes_gradient, dimensions = DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        shape = [next(numbers) for _ in range(dimensions)]
        tensors.append(torch.empty(shape, dtype=dtype, device=device).requires_grad_(takes_gradient))
    return tensors


class Activations:
    """The receiving end of an edge, forward: micro-batches in their order."""

    def __init__(self, comm, source: int, edge: int, device):
        self.comm, self.source, self.tag, self.device = comm, source, TAGS * edge, device
        self._headers, self._announced = [], []  # with their handles
        self._arriving, self._asked = {}, 0

    def post(self, microbatch: int, wait: bool = False) -> None:
        """Make room for micro-batches up to this one and ask for them, if their headers have come, or ``wait`` for
        that. In their order, as messages of one tag are matched in the order in which they are asked for."""
        while len(self._headers) <= microbatch:
            self._headers.append(torch.zeros(HEADER, dtype=torch.int64))
            self._announced.append(self.comm.recv(self._headers[-1], self.source, self.tag, async_op=True))
        while self._asked <= microbatch and (wait or self._announced[self._asked].done()):
            self._announced[self._asked].wait()
            tensors = room_for(self._headers[self._asked], self.device)
            handles = [self.comm.recv(t.detach(), self.source, self.tag + 1, async_op=True) for t in tensors]
            self._arriving[self._asked] = tensors, handles
            self._asked += 1

    def take(self, microbatch: int) -> list[torch.Tensor]:
        self.post(microbatch, wait=True)
        tensors, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return tensors


class Gradients:
    """The receiving end of an edge, backward: into tensors like those that were sent forward."""

    def __init__(self, comm, source: int, edge: int):
        self.comm, self.source, self.tag = comm, source, TAGS * edge + 2
        self._arriving = {}

    def post(self, microbatch: int, sent) -> None:
        if microbatch not in self._arriving:
            room = [torch.empty_like(t) if t.requires_grad else None for t in sent]
            handles = [self.comm.recv(t, self.source, self.tag, async_op=True) for t in room if t is not None]
            self._arriving[microbatch] = room, handles

    def take(self, microbatch: int, sent) -> list:
        self.post(microbatch, sent)
        room, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return room


def send_activations(comm, dest: int, edge: int, tensors) -> list:
    """Send a micro-batch on; returns handles."""
    handles = [comm.send(header_of(tensors), dest, TAGS * edge, async_op=True)]
    return handles + [comm.send(t.detach().contiguous(), dest, TAGS * edge + 1, async_op=True) for t in tensors]


def send_gradients(comm, dest: int, edge: int, received) -> list:
    """Send back the gradients of what was received; what was not used has gradients of zero."""
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received if t.requires_grad]
    return [comm.send(gradient.contiguous(), dest, TAGS * edge + 2, async_op=True) for gradient in gradients]
