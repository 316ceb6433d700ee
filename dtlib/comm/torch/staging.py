"""CUDA tensors on their way through host memory: GPU -> pinned host memory -> MPI -> pinned host memory -> GPU."""

from contextlib import contextmanager

from dtlib.comm.types import Payload, host_memory
from dtlib.errors import CommunicationError

STAGED = ("cuda",)  # kinds of devices whose tensors go through host memory


def staged(tensor, name: str, operation: str) -> "StagedPayload":
    """A tensor that is not on the CPU as MPI sees it: a copy in host memory.

    Raises:
        CommunicationError: for tensors on anything but a CUDA device.
    """
    if tensor.device.type not in STAGED:
        raise CommunicationError(
            f"{operation} carries tensors on the CPU or a CUDA device and this one is on {tensor.device}: pass "
            "tensor.cpu()."
        )
    return StagedPayload(tensor, name, operation)


class StagedPayload(Payload):
    """A copy of a tensor in pinned host memory, from which a GPU copies fastest; ``store()`` brings it back."""

    __slots__ = ("_host",)

    def __init__(self, tensor, name: str, operation: str):
        import torch

        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with _transfers(tensor):
            self._host.copy_(tensor.detach(), non_blocking=True)
        super().__init__(tensor, host_memory(self._host, name, operation))

    def store(self):
        with _transfers(self.tensor, after_others=False):
            self.tensor.detach().copy_(self._host, non_blocking=True)
        return self.tensor


_streams = {}


@contextmanager
def _transfers(tensor, after_others: bool = True):
    """Copies between host and device, done when the block is left.

    They run on a stream of their own, so that the host does not wait for what the program queues meanwhile. On the
    way out of the device they come after what is queued already, which may still be computing the tensor. On the
    way back nothing that is queued may use it: the operation is not over.
    """
    if not tensor.is_cuda:
        yield
        return
    import torch

    stream = _streams.get(tensor.device)
    if stream is None:
        stream = _streams[tensor.device] = torch.cuda.Stream(tensor.device)
    if after_others:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
