"""Messages between neighbouring stages: activations in the forward pass, gradients in the backward pass.

    stage s    header: the number of tensors, their dtypes and shapes,      -->  stage s+1 allocates receive buffers
               and the number of following micro-batches with the same shapes
               the tensors                                                  -->
               the tensors of the next micro-batch                          -->
               gradients of the tensors that require gradients              <--  into tensors of the same shapes

An edge connects two stages. In each direction its messages are sent in the order of micro-batches, so one tag per kind
of message is enough. Micro-batches may differ in shape, for example texts of different lengths or a smaller last one.
Then another header is sent. Otherwise the next receives are posted before the tensors are sent.
"""

import pickle
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dtlib.comm import Communicator, types
from dtlib.comm.waiting import Operation
from dtlib.errors import DtlibError

HEADER = 512  # bytes; enough for sixteen tensors of four dimensions
TAGS = 3  # tags per edge: headers, activations, gradients


def kinds_of(tensors: Iterable[Tensor]) -> tuple:
    """Return the dtype, requires_grad and shape of each tensor."""
    return tuple((tensor.dtype, tensor.requires_grad, tuple(tensor.shape)) for tensor in tensors)


@lru_cache(maxsize=1024)  # most steps repeat the shapes of the last one
def header_of(kinds: tuple, same_shapes: int) -> torch.Tensor:
    """Return the header for tensors of these kinds and the next ``same_shapes`` micro-batches; uint8 of length HEADER.

    Raises:
        DtlibError: for a dtype that cannot be sent, or for more tensors than fit into a header.
    """
    for dtype, *_ in kinds:
        types.check_name(types.dtype_name(dtype), "The output of a stage")
    content = pickle.dumps((kinds, same_shapes))
    if len(content) > HEADER:
        raise DtlibError(
            f"A stage gives {len(kinds)} tensors to the next one, which do not fit into a header of {HEADER} bytes: "
            "join some of them, with torch.stack or cat."
        )
    return torch.frombuffer(bytearray(content.ljust(HEADER, b"\0")), dtype=torch.uint8)


def read_header(header: torch.Tensor) -> tuple[tuple, int]:
    """Return the ``kinds`` and ``same_shapes`` of a header."""
    return pickle.loads(header.numpy().tobytes())


class Activations:
    """The receiving end of an edge in the forward pass."""

    def __init__(self, comm: Communicator, source: int, edge: int, device: torch.device):
        self.comm, self.source, self.tag, self.device = comm, source, TAGS * edge, device
        # For each micro-batch with a posted receive, the number of following micro-batches with the same shapes.
        self.same_shapes: list[int] = []
        self._header: tuple | None = None
        self._kinds: tuple = ()
        self._arriving: dict[int, tuple] = {}
        self._announced = 0  # micro-batches from this one on need a header

    def post(self, microbatch: int, wait: bool = False) -> None:
        """Post the receives of micro-batches up to this one, as far as their headers have arrived.

        With ``wait``, wait for the headers. Receives are posted in order, because messages of one tag are matched in
        the order of the receives.
        """
        while len(self.same_shapes) <= microbatch:
            # Shapes are unknown until the next header arrives.
            if len(self.same_shapes) == self._announced and not self._next_header(wait):
                return
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.device, requires_grad=takes_gradient)
                for dtype, takes_gradient, shape in self._kinds
            ]
            handles = [self.comm.recv(t.detach(), self.source, self.tag + 1, async_op=True) for t in tensors]
            self._arriving[len(self.same_shapes)] = tensors, handles
            self.same_shapes.append(self._announced - len(self.same_shapes) - 1)

    def _next_header(self, wait: bool) -> bool:
        """Post the receive of the next header. Read the header and return True if it has arrived."""
        if self._header is None:
            header = torch.zeros(HEADER, dtype=torch.uint8)
            self._header = header, self.comm.recv(header, self.source, self.tag, async_op=True)
        header, handle = self._header
        if not wait and not handle.done():
            return False
        handle.wait()
        self._kinds, same_shapes = read_header(header)
        # One header is valid for this micro-batch and the next ``same_shapes``.
        self._announced += 1 + same_shapes
        self._header = None
        return True

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """Wait for a micro-batch and return its tensors."""
        self.post(microbatch, wait=True)
        tensors, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return tensors


class NextStage:
    """The sending end of an edge in the forward pass."""

    def __init__(self, comm: Communicator, dest: int, edge: int):
        self.comm, self.dest, self.tag = comm, dest, TAGS * edge
        self._kinds: tuple | None = None
        self._same_shapes = 0

    def send(self, tensors: Sequence[Tensor], same_shapes: int) -> list[Operation]:
        """Send a micro-batch and return the handles; the next ``same_shapes`` inputs have the same shapes.

        Raises:
            DtlibError: if shapes differ from those of an earlier micro-batch whose inputs had the same shapes.
        """
        kinds, handles = kinds_of(tensors), []
        if self._same_shapes:
            self._same_shapes -= 1
            if kinds != self._kinds:
                # The next stage has already posted receives for the announced shapes.
                before, now = ([shape for *_, shape in each] for each in (self._kinds or (), kinds))
                raise DtlibError(
                    f"Micro-batches with inputs of equal shapes gave activations of shapes {before} and then {now}: "
                    "pad them, because the next stage has allocated memory for the first shapes."
                )
        else:
            self._kinds, self._same_shapes = kinds, same_shapes
            handles.append(self.comm.send(header_of(kinds, same_shapes), self.dest, self.tag, async_op=True))
        return handles + [
            self.comm.send(t.detach().contiguous(), self.dest, self.tag + 1, async_op=True) for t in tensors
        ]


class Place(NamedTuple):
    """Facts about a sent tensor that its backward pass needs: its edge in autograd's graph, shape, dtype and device.

    The tensor itself is freed when its message has been sent.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "Place | None":
        """Return the place of a tensor, or None if it requires no gradient."""
        if not tensor.requires_grad:
            return None
        return Place(get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return an uninitialised tensor like the sent one."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Gradients:
    """The receiving end of an edge in the backward pass."""

    def __init__(self, comm: Communicator, source: int, edge: int):
        self.comm, self.source, self.tag = comm, source, TAGS * edge + 2
        self._arriving: dict[int, tuple] = {}

    def post(self, microbatch: int, sent: Sequence[Place | None]) -> None:
        """Post the receives of a micro-batch's gradients, for the tensors that were ``sent`` forward."""
        if microbatch not in self._arriving:
            buffers = [place.empty() if place else None for place in sent]
            handles = [self.comm.recv(t, self.source, self.tag, async_op=True) for t in buffers if t is not None]
            self._arriving[microbatch] = buffers, handles

    def take(self, microbatch: int, sent: Sequence[Place | None]) -> list[Tensor | None]:
        """Wait for a micro-batch's gradients; None for tensors without gradients."""
        self.post(microbatch, sent)
        buffers, handles = self._arriving.pop(microbatch)
        for handle in handles:
            handle.wait()
        return buffers


def send_gradients(comm: Communicator, dest: int, edge: int, received: Sequence[Tensor]) -> list[Operation]:
    """Send the gradients of received tensors back and return the handles. An unused tensor has a gradient of zeros."""
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received if t.requires_grad]
    return [comm.send(gradient.contiguous(), dest, TAGS * edge + 2, async_op=True) for gradient in gradients]


def runs_of(kinds: list) -> list[int]:
    """For each element of a list, count the equal elements that directly follow it: [a, a, a, b] gives [2, 1, 0, 0]."""
    return [left for _, equal in groupby(kinds) for left in reversed(range(len([*equal])))]
