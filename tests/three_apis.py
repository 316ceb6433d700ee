"""The operations of a communicator, called through torch.distributed or mpi4py: what answers in these APIs do."""

import functools
import inspect

import numpy as np
import torch
from torch import distributed as dist

from dtlib.comm import Communicator


def _on_tensors(operation):
    """An operation that may get numpy's arrays, too: it works on their memory."""

    def call(self, *arguments, **named):
        tensors = [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in arguments]
        got = operation(self, *tensors, **named)
        return next((array for array, tensor in zip(arguments, tensors, strict=True) if got is tensor), got)

    return call


class _Api:
    """``rank``, ``size`` and ``members`` of a communicator; the operations are called elsewhere."""

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size, self.members = comm.rank, comm.size, comm.members
        self.group, self.mpi = comm.group, comm.mpi

    def __init_subclass__(cls):
        for name, operation in list(vars(cls).items()):
            if inspect.isfunction(operation) and not name.startswith("_"):
                setattr(cls, name, _on_tensors(operation))

    def split(self, color, key=0):
        part = self.comm.split(color, key)
        return None if part is None else type(self)(part)


class _Handle:
    def __init__(self, work, tensor):
        self.work, self.tensor = work, tensor

    def wait(self):
        self.work.wait()
        return self.tensor


class ByTorch(_Api):
    """torch.distributed on ``comm.group``."""

    def send(self, tensor, dest, tag=0, async_op=False):
        if async_op:
            return _Handle(dist.isend(tensor, group_dst=dest, group=self.group, tag=tag), tensor)
        dist.send(tensor, group_dst=dest, group=self.group, tag=tag)
        return tensor

    def recv(self, tensor, source, tag=0, async_op=False):
        if async_op:
            return _Handle(dist.irecv(tensor, group_src=source, group=self.group, tag=tag), tensor)
        dist.recv(tensor, group_src=source, group=self.group, tag=tag)
        return tensor

    def broadcast(self, tensor, root=0):
        dist.broadcast(tensor.detach(), group_src=root, group=self.group)
        return tensor

    def _reduced(self, collective, tensor, op, async_op=False):
        kinds = {
            "sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
        }  # fmt: skip
        work = collective(op=kinds[op], group=self.group, async_op=async_op)
        return _Handle(work, tensor) if async_op else tensor

    def all_reduce(self, tensor, op="sum", async_op=False, algorithm=None):
        return self._reduced(lambda **rest: dist.all_reduce(tensor, **rest), tensor, op, async_op)

    def reduce(self, tensor, root=0, op="sum"):
        return self._reduced(lambda **rest: dist.reduce(tensor, group_dst=root, **rest), tensor, op)

    def reduce_scatter(self, out, tensor, op="sum", async_op=False):
        return self._reduced(lambda **rest: dist.reduce_scatter_single(out, tensor, **rest), out, op, async_op)

    def all_gather(self, out, tensor):
        dist.all_gather_single(out, tensor, group=self.group)
        return out

    def all_to_all(self, out, tensor, received=None, sent=None):
        dist.all_to_all_single(out, tensor, received, sent, group=self.group)
        return out

    def all_gather_object(self, thing):
        dist.all_gather_object(everyones := [None] * self.size, thing, group=self.group)
        return everyones

    def barrier(self):
        self.group.barrier().wait()


class ByMpi4py(_Api):
    """mpi4py on ``comm.mpi``, with the memory of tensors."""

    def send(self, tensor, dest, tag=0, async_op=False):
        request = self.mpi.Isend(tensor.detach().contiguous().numpy(), dest, tag)
        return _Handle(request, tensor) if async_op else _Handle(request, tensor).wait()

    def recv(self, tensor, source, tag=0, async_op=False):
        request = self.mpi.Irecv(tensor.detach().numpy(), source, tag)
        return _Handle(request, tensor) if async_op else _Handle(request, tensor).wait()

    def broadcast(self, tensor, root=0):
        self.mpi.Bcast(tensor.detach().numpy(), root)
        return tensor

    def _op(self, op):
        from mpi4py import MPI

        return {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}[op]

    def all_reduce(self, tensor, op="sum", async_op=False, algorithm=None):
        from mpi4py import MPI

        self.mpi.Allreduce(MPI.IN_PLACE, tensor.detach().numpy(), self._op(op))
        if op == "mean":
            tensor.detach().div_(self.size)
        return _Done(tensor) if async_op else tensor

    def reduce(self, tensor, root=0, op="sum"):
        from mpi4py import MPI

        array = tensor.detach().numpy()
        arguments = (MPI.IN_PLACE, array) if self.rank == root else (array, None)
        self.mpi.Reduce(*arguments, self._op(op), root)
        if op == "mean" and self.rank == root:
            tensor.detach().div_(self.size)
        return tensor

    def reduce_scatter(self, out, tensor, op="sum", async_op=False):
        self.mpi.Reduce_scatter_block(tensor.detach().contiguous().numpy(), out.numpy(), self._op(op))
        if op == "mean":
            out.div_(self.size)
        return _Done(out) if async_op else out

    def all_gather(self, out, tensor):
        self.mpi.Allgather(tensor.detach().contiguous().numpy(), out.numpy())
        return out

    def all_to_all(self, out, tensor, received=None, sent=None):
        row = tensor[0].numel() if len(tensor) else out[0].numel() if len(out) else 1
        if received is None:
            self.mpi.Alltoall(tensor.detach().contiguous().numpy(), out.detach().numpy())
        else:
            counts = ([row * n for n in sent], None), ([row * n for n in received], None)
            mine = tensor.detach().contiguous().numpy()
            self.mpi.Alltoallv([mine, counts[0]], [out.detach().numpy(), counts[1]])
        return out

    def all_gather_object(self, thing):
        return self.mpi.allgather(thing)

    def barrier(self):
        self.mpi.Barrier()


class _Done:
    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


APIS = {"torch.distributed": ByTorch, "mpi4py": ByMpi4py}


def by(api, answer):
    """An answer, a function or a class, that gets ``api(comm)`` where it gets a communicator."""

    def translated(arguments):
        return [api(one) if isinstance(one, Communicator) else one for one in arguments]

    if inspect.isclass(answer):

        def construct(self, *arguments, **named):
            answer.__init__(self, *translated(arguments), **named)

        return type(answer.__name__, (answer,), {"__init__": construct})
    return functools.wraps(answer)(lambda *arguments, **named: answer(*translated(arguments), **named))
