"""Right answers to exercises in dtlib's API; test_three_apis.py has them call the two others, too."""

import math

import torch
from torch import nn
from torch.nn.functional import linear

from dtlib import pi

# pi-on-ranks


def estimate_pi(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    inside = torch.tensor([pi.count_compiled(start, stop)])
    comm.all_reduce(inside)
    return 4 * inside.item() / points


# ring-build


def my_all_reduce(comm, tensor):
    rank, size = comm.rank, comm.size
    chunks = torch.tensor_split(tensor, size)
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        outgoing = rank - step - 1 if adds else rank - step + size - 1
        incoming = chunks[(outgoing - 1) % size]
        received = torch.empty_like(incoming)
        sending = comm.send(chunks[outgoing % size], (rank + 1) % size, async_op=True)
        comm.recv(received, (rank - 1) % size)
        sending.wait()
        incoming.copy_(incoming + received if adds else received)
    return tensor


# hook-fix


def average_with_hooks(comm, module):
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor)

    def gradient_is_ready(parameter):
        comm.all_reduce(parameter.grad, op="mean")

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_is_ready)


# buckets-build


class MyDataParallel:
    def __init__(self, comm, module, bucket_bytes):
        self.comm, self.module, self.bucket_bytes = comm, module, bucket_bytes
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor)

    def average_gradients(self, samples):
        total = self.comm.all_reduce(torch.tensor(samples)).item()
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        bucket, filled = [], 0
        for parameter in reversed(parameters):
            if bucket and filled + parameter.grad.nbytes > self.bucket_bytes:
                self.reduce(bucket, samples / total)
                bucket, filled = [], 0
            bucket.append(parameter.grad)
            filled += parameter.grad.nbytes
        self.reduce(bucket, samples / total)

    def reduce(self, gradients, weight):
        flat = torch.cat([gradient.flatten() for gradient in gradients]) * weight
        self.comm.all_reduce(flat)
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


# zero2-fix


def shard_gradients(comm, module):
    shards = {}

    def gradient_is_ready(parameter):
        length = -(-parameter.numel() // comm.size)  # rounded up
        flat = torch.zeros(length * comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        own = torch.empty(length, dtype=parameter.dtype)
        comm.reduce_scatter(own, flat, op="mean")
        shards[parameter] = own
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return shards


# sharded-adam


class ShardedAdam:
    def __init__(self, comm, parameters, **settings):
        self.comm, self.parameters = comm, list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = self.flattened(parameter.detach() for parameter in self.parameters)
        views = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.own = nn.Parameter(self.flat.chunk(comm.size)[comm.rank])
        self.adam = torch.optim.AdamW([self.own], **settings)

    def flattened(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.comm.size))

    def step(self):
        gradients = self.flattened(parameter.grad for parameter in self.parameters)
        self.own.grad = torch.empty_like(self.own)
        self.comm.reduce_scatter(self.own.grad, gradients, op="mean")
        self.adam.step()
        self.comm.all_gather(self.flat, self.own.detach())


# gather-on-demand


class OnDemand:
    def __init__(self, comm, layer):
        self.comm, self.shape = comm, layer.weight.shape  # (outputs, inputs)
        flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
        flat = nn.functional.pad(flat, (0, -len(flat) % comm.size))
        self.own = flat.chunk(comm.size)[comm.rank].clone()

    def __call__(self, x):
        whole = torch.empty(len(self.own) * self.comm.size, dtype=self.own.dtype)
        self.comm.all_gather(whole, self.own)
        outputs, inputs = self.shape
        weight, bias = whole[: outputs * inputs], whole[outputs * inputs :][:outputs]
        return linear(x, weight.view(self.shape), bias)


# gpipe-build


def my_gpipe(comm, stage, inputs, targets, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    samples = sum(len(x) for x in inputs)
    outputs, losses = [], []
    for x in inputs:
        if not first:
            comm.recv(x, comm.rank - 1).requires_grad_()
        outputs.append(stage(x))
        if not last:
            comm.send(outputs[-1].detach(), comm.rank + 1)
    for x, output, target in zip(inputs, outputs, targets, strict=True):
        if last:
            losses.append(loss_fn(output, target) * len(x) / samples)
            losses[-1].backward()
        else:
            output.backward(comm.recv(torch.empty_like(output), comm.rank + 1))
        if not first:
            comm.send(x.grad, comm.rank - 1)
    return sum(losses)


# 1f1b-build


def my_1f1b(comm, stage, inputs, targets, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    samples = sum(len(x) for x in inputs)
    outputs, sending, losses = {}, [], []

    def forward(m):
        if not first:
            comm.recv(inputs[m], comm.rank - 1).requires_grad_()
        outputs[m] = stage(inputs[m])
        if not last:
            sending.append(comm.send(outputs[m].detach(), comm.rank + 1, async_op=True))

    def backward(m):
        output, gradient = outputs.pop(m), None
        if last:
            output = loss_fn(output, targets[m]) * len(inputs[m]) / samples
            losses.append(output.detach())
        else:
            gradient = comm.recv(torch.empty_like(output), comm.rank + 1)
        output.backward(gradient)
        if not first:
            sending.append(comm.send(inputs[m].grad, comm.rank - 1, async_op=True))

    ahead = min(comm.size - comm.rank - 1, len(inputs))
    for m in range(ahead):
        forward(m)
    for m in range(len(inputs)):
        if m + ahead < len(inputs):
            forward(m + ahead)
        backward(m)
    for handle in sending:
        handle.wait()
    return sum(losses)


# dispatch-build


def dispatch(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=comm.size)
    sent = counts.tolist()
    received = comm.all_to_all(torch.empty_like(counts), counts).tolist()
    arrived = comm.all_to_all(x.new_empty(sum(received), x.shape[1]), x[order], received, sent)
    out = torch.empty_like(x)
    out[order] = comm.all_to_all(torch.empty_like(x), expert(arrived), sent, received)
    return out


# outer-fix


def outer_step(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


# top-k-build


def top_k(comm, gradient, kept, fraction):
    wanted = gradient + kept
    k = math.ceil(fraction * len(wanted))
    places = wanted.abs().topk(k).indices
    everyones_places = comm.all_gather(places.new_empty(comm.size * k), places)
    everyones_values = comm.all_gather(wanted.new_empty(comm.size * k), wanted[places])
    mean = torch.zeros_like(wanted)
    mean.index_add_(0, everyones_places, everyones_values / comm.size)
    return mean, wanted.index_fill(0, places, 0)
