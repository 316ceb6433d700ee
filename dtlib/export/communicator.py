"""torch.distributed under the names that plain cores use: what an exported file has in the place of dtlib."""

from torch import distributed as dist


class Work:
    """A message under way; ``wait()`` returns its tensor."""

    def __init__(self, work, tensor, divisor=None):
        self.work, self.tensor, self.divisor = work, tensor, divisor

    def wait(self):
        self.work.wait()
        return self.tensor.div_(self.divisor) if self.divisor else self.tensor


class Communicator:
    """torch.distributed under the names of the code below."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, tensor, root=0):
        dist.broadcast(tensor.detach(), root)
        return tensor

    def all_reduce(self, tensor, op="sum", async_op=False):
        work = Work(dist.all_reduce(tensor, async_op=True), tensor, self.size if op == "mean" else None)
        return work if async_op else work.wait()

    def reduce_scatter(self, out, tensor, op="sum"):
        dist.reduce_scatter_tensor(out, tensor)
        return out.div_(self.size) if op == "mean" else out

    def all_gather(self, out, tensor):
        dist.all_gather_into_tensor(out, tensor.detach())
        return out

    def all_to_all(self, out, tensor, come=None, sent=None):
        dist.all_to_all_single(out, tensor.detach().contiguous(), come, sent)
        return out

    def send(self, tensor, dest, tag=0, async_op=False):
        work = Work(dist.isend(tensor.contiguous(), dest, self.groups[dest > self.rank], tag), tensor)
        return work if async_op else work.wait()

    def recv(self, tensor, source, tag=0, async_op=False):
        work = Work(dist.irecv(tensor, source, self.groups[source < self.rank], tag), tensor)
        return work if async_op else work.wait()
