"""torch.distributed under the names that plain cores use: what an exported file has in the place of dtlib."""

from torch import Tensor
from torch import distributed as dist


class Handle:
    """A message under way; ``wait()`` returns its tensor."""

    def __init__(self, work: dist.Work | None, tensor: Tensor, divisor: int | None = None):
        self.work, self.tensor, self.divisor, self.done = work, tensor, divisor, getattr(work, "is_completed", bool)

    def wait(self) -> Tensor:
        if self.work:
            self.work.wait()
        return self.tensor.div_(self.divisor) if self.divisor else self.tensor


class Communicator:
    """torch.distributed under the names of the code below."""

    groups: tuple  # for messages to ranks below, and above

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        dist.broadcast(tensor.detach(), root)
        return tensor

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Tensor | Handle:
        work = Handle(dist.all_reduce(tensor, async_op=True), tensor, self.size if op == "mean" else None)
        return work if async_op else work.wait()

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum") -> Tensor:
        dist.reduce_scatter_tensor(out, tensor)
        return out.div_(self.size) if op == "mean" else out

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        dist.all_gather_into_tensor(out, tensor.detach())
        return out

    def all_to_all(self, out: Tensor, tensor: Tensor, come: list | None = None, sent: list | None = None) -> Tensor:
        dist.all_to_all_single(out, tensor.detach().contiguous(), come, sent)
        return out

    def send(self, tensor: Tensor, dest: int, tag: int = 0, async_op: bool = False) -> Tensor | Handle:
        work = Handle(dist.isend(tensor.contiguous(), dest, self.groups[dest > self.rank], tag), tensor)
        return work if async_op else work.wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0, async_op: bool = False) -> Tensor | Handle:
        work = Handle(dist.irecv(tensor, source, self.groups[source < self.rank], tag), tensor)
        return work if async_op else work.wait()
