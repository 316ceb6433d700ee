"""Plausible wrong ways to build the GPipe clock: right gradients, perhaps, in another order or by other messages."""

import torch

from tests.lessons.l07.wrong_pipelines import Right1F1B, Step

# build: my_gpipe(comm, stage, inputs, targets, loss_fn)


class BackwardInAnotherOrder(Step):
    """The last rank begins with the last micro-batch, the others with the first."""

    def run(self, count):
        for m in range(count):
            self.forward(m)
        for m in reversed(range(count)) if self.last else range(count):
            self.backward(m)


class OrdersHiddenByTags(Step):
    """The same, with a tag for each micro-batch, and sends that wait: short messages wait to be wanted."""

    async_op = False

    def run(self, count):
        for m in range(count):
            self.forward(m)
        for m in reversed(range(count)) if self.last else range(count):
            self.backward(m)

    def backward(self, m):
        if self.last:
            return super().backward(m)
        gradient = self.comm.recv(torch.empty_like(self.outputs[m]), self.comm.rank + 1, tag=m)
        self.outputs[m].backward(gradient)
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)

    def send(self, tensor, dest, m):
        self.comm.send(tensor, dest, tag=m if dest < self.comm.rank else 0)


class SendsBeforeItReceives(Step):
    """Every rank first sends what it has, a gradient among it, and then asks for what it needs; sends wait."""

    async_op = False

    def run(self, count):
        for m in range(count):
            if self.last:
                self.forward(m)
                self.backward(m)
            else:
                self.forward(m)
        for m in range(0 if self.last else count):
            self.backward(m)


class WaitsInACircle(Step):
    """Each rank wants the gradient of a micro-batch before it sends the activations on that it depends on."""

    def forward(self, m):
        if not self.first:
            self.comm.recv(self.inputs[m], self.comm.rank - 1)
            self.inputs[m].requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])

    def backward(self, m):
        if not self.last:
            gradient = self.comm.recv(torch.empty_like(self.outputs[m]), self.comm.rank + 1)
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)
            self.outputs[m].backward(gradient)
            return
        super().backward(m)


class EverybodyReceives(Step):
    """Rank 0 too, from rank -1."""

    def forward(self, m):
        self.first = False
        super().forward(m)


class WholeBatchAtOnce(Step):
    """Right values, from one micro-batch that is the whole batch."""

    def __call__(self, comm, stage, inputs, targets, loss_fn):
        return super().__call__(comm, stage, [torch.cat(inputs)], [torch.cat(targets)], loss_fn)


class SendsAfterAllForwardPasses(Step):
    """Micro-batches that nobody else gets to see before the last one has passed."""

    def run(self, count):
        self.late = []
        for m in range(count):
            self.forward(m)
        self.flush()
        for m in range(count):
            self.backward(m)
        self.flush()

    def send(self, tensor, dest, m):
        self.late.append((tensor, dest, m))

    def flush(self):
        for entry in self.late:
            super().send(*entry)
        self.late = []


class OneBackwardForAll(Step):
    """The last rank adds up all losses and goes back once: right, and the others wait until all of it is done."""

    def run(self, count):
        for m in range(count):
            self.forward(m)
        if self.last:
            losses = [self.loss_fn(self.outputs[m], self.targets[m]) * self.weight(m) for m in range(count)]
            self.loss = sum(losses)
            self.loss.backward()
        for m in range(count):
            if not self.last:
                self.backward(m)
            elif not self.first:
                self.send(self.inputs[m].grad, self.comm.rank - 1, m)


class OneMessageForAll(SendsAfterAllForwardPasses):
    """Outputs of all micro-batches in one tensor."""

    def flush(self):
        if self.late:
            _, dest, _ = self.late[0]
            Step.send(self, torch.cat([tensor for tensor, *_ in self.late]), dest, 0)
        self.late = []

    def forward(self, m):
        if m == 0 and not self.first:
            self.comm.recv(whole := torch.cat(self.inputs), self.comm.rank - 1)
            for x, piece in zip(self.inputs, whole.split([len(x) for x in self.inputs]), strict=True):
                x.copy_(piece).requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)

    def backward(self, m):
        if self.last:
            return super().backward(m)
        if m == 0:
            whole = torch.cat([output.detach() for output in self.outputs.values()])
            self.comm.recv(whole, self.comm.rank + 1)
            self.gradients = whole.split([len(x) for x in self.inputs])
        self.outputs[m].backward(self.gradients[m])
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)


class EqualMicrobatchesOnly(Step):
    """All messages are as long as the first."""

    def forward(self, m):
        if not self.first:
            received = self.comm.recv(torch.empty_like(self.inputs[0]), self.comm.rank - 1)
            self.inputs[m] = received.requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)


class TwoRanksOnly(Step):
    """Whoever is not the first is the last."""

    def run(self, count):
        self.last = not self.first
        super().run(count)


class SkipsTheMiddle(Step):
    """Gradients go straight to rank 0."""

    def send(self, tensor, dest, m):
        super().send(tensor, 0 if dest < self.comm.rank else dest, m)


class ComputesBeforeItReceives(Step):
    """The stage gets an empty room; what has arrived is there when it is too late."""

    def forward(self, m):
        self.outputs[m] = self.stage(self.inputs[m].clone().requires_grad_())
        if not self.first:
            self.comm.recv(self.inputs[m], self.comm.rank - 1)
            self.inputs[m].requires_grad_()
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)


class TellsEverybodyTheLoss(Step):
    def __call__(self, *arguments):
        loss = torch.tensor(super().__call__(*arguments))
        return self.comm.broadcast(loss, self.comm.size - 1)


class SendsMoreThanItMust(Step):
    """Two copies, and the second is thrown away."""

    def send(self, tensor, dest, m):
        super().send(torch.cat([tensor, tensor]), dest, m)

    def forward(self, m):
        if self.first:
            return super().forward(m)
        both = self.comm.recv(torch.cat([self.inputs[m]] * 2), self.comm.rank - 1)
        self.inputs[m].copy_(both[: len(self.inputs[m])]).requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)

    def backward(self, m):
        if self.last:
            return super().backward(m)
        output = self.outputs[m]
        both = self.comm.recv(torch.cat([output.detach()] * 2), self.comm.rank + 1)
        output.backward(both[: len(output)])
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)


class NeverWaits(Step):
    """Handles are dropped: short messages have left by then, long ones nobody knows of."""

    def send(self, tensor, dest, m):
        self.comm.send(tensor, dest, async_op=True)


class WaitsForTheLastSend(Step):
    """One name for all handles: the others are forgotten."""

    def send(self, tensor, dest, m):
        self.sending = [self.comm.send(tensor, dest, async_op=True)]


class ComputesTwice(Step):
    """A forward pass too many, with a graph that nobody uses."""

    def forward(self, m):
        super().forward(m)
        self.stage(self.inputs[m].detach())


# The last entry: the fewest ranks on which the mistake can be seen.
WRONG = {
    "gpipe-build": {
        Right1F1B: ("not-all-forward-first", 2),
        BackwardInAnotherOrder: ("backward-order", 2),
        OrdersHiddenByTags: ("long-messages", 2),
        SendsBeforeItReceives: ("not-all-forward-first", 2),
        WaitsInACircle: ("waited", 2),
        EverybodyReceives: ("raised", 2),
        WholeBatchAtOnce: ("no-microbatches", 2),
        SendsAfterAllForwardPasses: ("sent-late", 2),
        OneBackwardForAll: ("sent-late", 2),
        OneMessageForAll: ("whole-batch", 2),
        EqualMicrobatchesOnly: ("uneven", 2),
        TwoRanksOnly: ("loss-elsewhere", 3),
        SkipsTheMiddle: ("not-a-neighbour", 3),
        ComputesBeforeItReceives: ("other-input", 2),
        TellsEverybodyTheLoss: ("collective-inside", 2),
        SendsMoreThanItMust: ("bytes", 2),
        NeverWaits: ("not-waited", 2),
        WaitsForTheLastSend: ("not-waited", 2),
        ComputesTwice: ("forward-count", 2),
    },
}  # fmt: skip
