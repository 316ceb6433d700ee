"""The exercises of lesson 07 on ranks: right steps of a pipeline pass, wrong ones are rejected for their own reason."""

import torch
from torch.autograd.graph import get_gradient_edge

from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lab.checks.judging import judge_on_this_rank
from tests.lessons.l07 import wrong_leak, wrong_pipelines, wrong_puzzle
from tests.ranks import on_ranks


class Gradients1By1(wrong_pipelines.Step):
    """torch.autograd.grad instead of backward, fresh tensors instead of those that came, tensors instead of numbers."""

    def forward(self, m):
        x = self.inputs[m].clone()
        if not self.first:
            x = self.comm.recv(x, self.comm.rank - 1).requires_grad_()
        self.outputs[m] = x, self.stage(x)
        if not self.last:
            self.send(self.outputs[m][1].detach().clone(), self.comm.rank + 1, m)
        self.loss = torch.as_tensor(self.loss)

    def backward(self, m):
        x, output = self.outputs[m]
        gradient, wanted = None, [*self.stage.parameters()] + [x] * (not self.first)
        if self.last:
            output = self.loss_fn(output, self.target(m)) * self.weight(m)
            self.loss = self.loss + output.detach()
        else:
            gradient = self.comm.recv(torch.empty_like(output), self.comm.rank + 1)
        gradients = torch.autograd.grad(output, wanted, gradient)
        for parameter, value in zip(self.stage.parameters(), gradients, strict=False):
            parameter.grad = value if parameter.grad is None else parameter.grad + value
        if not self.first:
            self.send(gradients[-1], self.comm.rank - 1, m)


class BackwardFromTheLast(wrong_pipelines.Step):
    """As in figure 2(c) of the GPipe paper."""

    def run(self, count):
        for m in range(count):
            self.forward(m)
        for m in reversed(range(count)):
            self.backward(m)


class SendsThatWait(wrong_pipelines.Step):
    """In GPipe activations go one way, and then gradients the other: nobody can wait in a circle."""

    async_op = False


class ReceivesAskedForFirst(wrong_pipelines.Step):
    """All receives are posted before the first forward pass; even stage 0 has gradients of its inputs."""

    def run(self, count):
        self.arriving = [
            None if self.first else self.comm.recv(x, self.comm.rank - 1, async_op=True) for x in self.inputs
        ]
        super().run(count)

    def forward(self, m):
        if self.arriving[m]:
            self.arriving[m].wait()
        output = self.outputs[m] = self.stage(self.inputs[m].requires_grad_())
        if not self.last:
            self.send(output.detach(), self.comm.rank + 1, m)


class Receives1F1BAskedForFirst(ReceivesAskedForFirst):
    order = "1f1b"


class HeadersFirst(wrong_pipelines.Step):
    """Shapes travel before activations, as in the library; outputs are kept to the end."""

    def forward(self, m):
        shape = torch.zeros(2, dtype=torch.int64)
        if not self.first:
            self.comm.recv(shape, self.comm.rank - 1, tag=1)
            x = torch.empty(*shape.tolist(), dtype=torch.float64)
            self.inputs[m] = self.comm.recv(x, self.comm.rank - 1).requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])
        self.kept = [*getattr(self, "kept", []), self.outputs[m]]
        if not self.last:
            shape = torch.tensor(self.outputs[m].shape)
            self.sending.append(self.comm.send(shape, self.comm.rank + 1, tag=1, async_op=True))
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)


class GraphsTravelToo(wrong_pipelines.Step):
    """What is sent is not detached, room wants gradients before it is filled, and a product takes the gradient in."""

    def forward(self, m):
        x = self.inputs[m]
        if not self.first:
            self.comm.recv(x.requires_grad_(), self.comm.rank - 1)
        self.outputs[m] = self.stage(x)
        if not self.last:
            self.send(self.outputs[m], self.comm.rank + 1, m)

    def backward(self, m):
        if self.last:
            return super().backward(m)
        gradient = self.comm.recv(torch.empty_like(self.outputs[m]), self.comm.rank + 1)
        (self.outputs[m] * gradient).sum().backward()
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)


class Headers1F1B(HeadersFirst):
    """There an output may stay until its backward pass."""

    order = "1f1b"
    kept = ()

    def backward(self, m):
        self.kept = []
        super().backward(m)


class OneBackwardOneForward(wrong_pipelines.Right1F1B):
    """The same order, told another way: fill up, then a backward and a forward pass in turn."""

    def run(self, count):
        filled = min(self.comm.size - self.comm.rank, count)
        for m in range(filled):
            self.forward(m)
        for m in range(count):
            self.backward(m)
            if m + filled < count:
                self.forward(m + filled)


class ReceivesBeforeItSends(wrong_pipelines.Right1F1B):
    """Sends that wait are no harm where the receives have been asked for."""

    async_op = False

    def run(self, count):
        self.arriving = [
            None if self.first else self.comm.recv(x, self.comm.rank - 1, async_op=True) for x in self.inputs
        ]
        super().run(count)

    forward = ReceivesAskedForFirst.forward


class ComputesAgain(wrong_pipelines.Step):
    """Keeps inputs alone, and computes each forward pass once more before it goes backward."""

    def forward(self, m):
        with torch.no_grad():
            super().forward(m)

    def backward(self, m):
        self.outputs[m] = self.stage(self.inputs[m])
        super().backward(m)


class WeightsOfATensor(wrong_pipelines.Step):
    """Whole numbers divided are a float32 in torch."""

    def weight(self, m):
        samples = torch.tensor([len(x) for x in self.inputs])
        return (samples[m] / samples.sum()).item()


class Checkpoints(wrong_pipelines.Step):
    """The same by torch's hand."""

    def forward(self, m):
        from torch.utils.checkpoint import checkpoint

        whole = self.stage
        self.stage = lambda x: checkpoint(whole, x.requires_grad_(), use_reentrant=True)
        super().forward(m)
        self.stage = whole


def trains_right(comm, stage, x, target):
    wrong_pipelines.train(comm, stage, x, target, wrong_pipelines.mean_square)


def trains_and_multiplies_afterwards(comm, stage, x, target):
    wrong_pipelines.trains_as_it_was(comm, stage, x, target)
    for parameter in stage.parameters():
        parameter.grad *= 4


class WaitsWithTheGradient(wrong_leak.Repair):
    """Once its gradient has arrived, an output has long left; and a gradient is waited for with the next one."""

    sent: tuple = ()

    def forward(self, m):
        super().forward(m)
        self.kept[m] = *self.kept[m], self.sending[-1:]

    def take(self, m):
        *pair, self.sent = self.kept.pop(m)
        return pair

    def drop(self):
        super().drop()
        for handle, _ in self.sent:
            handle.wait()
        self.sent = ()


class KeepsPlacesInTheGraph(wrong_leak.Repair):
    """An output that has been sent is freed before its backward pass."""

    def forward(self, m):
        super().forward(m)
        x, y = self.kept[m]
        self.kept[m] = x, get_gradient_edge(y)

    def backward(self, m):
        x, edge = self.take(m)
        gradient = None if self.last else self.comm.recv(torch.empty_like(self.like), self.comm.rank + 1)
        torch.autograd.backward(edge, gradient)
        if not self.first:
            self.send(x.grad, self.comm.rank - 1)
        self.drop()


class LogsAFewNumbers(wrong_leak.Repair):
    def log(self, output):
        super().log(output)
        self.spread = [*getattr(self, "spread", []), output.detach().std()]


class WaitsForTheOldest(wrong_leak.Repair):
    """Only the newest message may be on its way, once a micro-batch is finished."""

    def drop(self):
        pass

    def backward(self, m):
        super().backward(m)
        while len(self.sending) > 1:
            self.sending.pop(0)[0].wait()


class DropsNowAndThen(wrong_leak.Repair):
    """A few finished sends more are held, however many micro-batches there are."""

    def backward(self, m):
        self.wanted = m % 2
        super().backward(m)

    def goes(self, handle, dest):
        return getattr(self, "wanted", 0) and super().goes(handle, dest)


RIGHT = {
    "leak-fix": (
        wrong_leak.Repair, WaitsWithTheGradient, KeepsPlacesInTheGraph, LogsAFewNumbers, WaitsForTheOldest,
        DropsNowAndThen,
    ),
    "pipeline-fix": (trains_right, trains_and_multiplies_afterwards),
    "gpipe-build": (
        wrong_pipelines.Step, Gradients1By1, BackwardFromTheLast, SendsThatWait, ReceivesAskedForFirst, HeadersFirst,
        GraphsTravelToo, ComputesAgain, Checkpoints, WeightsOfATensor,
    ),
    "1f1b-build": (
        wrong_pipelines.Right1F1B, Receives1F1BAskedForFirst, Headers1F1B, OneBackwardOneForward, ReceivesBeforeItSends,
    ),
}  # fmt: skip


# For the test that goes through all exercises (test_check.py).
RIGHT_PUZZLES = {
    "puzzle": wrong_puzzle.GPIPE, "puzzle_2": wrong_puzzle.ONE_F_ONE_B, "puzzle_3": wrong_puzzle.THREE,
    "puzzle_4": wrong_puzzle.HALVES,
}  # fmt: skip


@on_ranks(3)
def test_tensors_that_an_earlier_answer_left_behind_do_not_count(world):
    left = []  # as the frames of an interrupted wait keep them

    class Leaves(wrong_pipelines.Right1F1B):
        def backward(self, m):
            left.append(self.outputs[m].detach().clone())
            super().backward(m)

    name = EXERCISES["1f1b-build"].name
    assert judge_on_this_rank("1f1b-build", {name: Leaves()}).mistake == "outputs-kept" and left
    verdict = judge_on_this_rank("1f1b-build", {name: wrong_pipelines.Right1F1B()})
    assert verdict.passed, verdict.text()
