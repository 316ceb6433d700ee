"""Plausible wrong ways to build 1F1B, and the mistake that the check must recognise in each."""

import torch

from tests.lessons.l07.wrong_pipelines import AveragedTwice, Right1F1B, Step, Unweighted, does_nothing

# build: my_1f1b(comm, stage, inputs, targets, loss_fn)


class SendsThatWait(Right1F1B):
    """The famous deadlock: activations go down while gradients come up, and both sends wait."""

    async_op = False


class NoWarmUp(Right1F1B):
    """One micro-batch at a time: as little memory as there can be, and no pipeline."""

    def run(self, count):
        for m in range(count):
            self.forward(m)
            self.backward(m)


class OneTooManyAhead(Right1F1B):
    """The warm-up has one forward pass more than the papers', and then one forward comes before one backward."""

    def run(self, count):
        ahead = min(self.comm.size - self.comm.rank, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)


class SameWarmUpEverywhere(Right1F1B):
    def run(self, count):
        ahead = min(self.comm.size - 1, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)


class WarmUpTheWrongWayRound(Right1F1B):
    """Rank r does r forward passes first: rank 0 wants a gradient before anybody can have one, and all wait."""

    def run(self, count):
        ahead = min(self.comm.rank, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)


class SendsAfterTheBackwardPass(Right1F1B):
    """The right order; but the rank behind waits for activations while a backward pass goes on here."""

    def forward(self, m):
        self.held = []
        super().forward(m)
        if len(self.outputs) < self.comm.size - self.comm.rank and m + 1 < len(self.inputs):
            self.flush()

    def backward(self, m):
        super().backward(m)
        self.flush()

    def flush(self):
        while self.held:
            Step.send(self, *self.held.pop())

    def send(self, tensor, dest, m):
        if dest < self.comm.rank:
            return super().send(tensor, dest, m)
        self.held.append((tensor, dest, m))


class ManyMicrobatchesOnly(Right1F1B):
    """The warm-up is longer than the batch."""

    def run(self, count):
        ahead = self.comm.size - self.comm.rank - 1
        for m in range(ahead):
            self.forward(m)
        for m in range(count - ahead):
            self.forward(m + ahead)
            self.backward(m)
        for m in range(count - ahead, count):
            self.backward(m)


class TailForgotten(Right1F1B):
    """The backward passes that are left over after the last forward pass."""

    def run(self, count):
        ahead = min(self.comm.size - self.comm.rank - 1, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count - ahead):
            self.forward(m + ahead)
            self.backward(m)


class KeepsGraphs(Right1F1B):
    """The right order, and memory as with GPipe."""

    def backward(self, m):
        gradient = torch.ones(())
        output = self.outputs[m]
        if self.last:
            output = self.loss_fn(output, self.targets[m]) * self.weight(m)
            self.loss += output.item()
        else:
            gradient = self.comm.recv(torch.empty_like(output), self.comm.rank + 1)
        output.backward(gradient, retain_graph=True)
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)


class ComputesAgain(Right1F1B):
    """Keeps inputs alone, and computes each forward pass once more: GPipe's remedy, which 1F1B does not need."""

    def forward(self, m):
        with torch.no_grad():
            super().forward(m)

    def backward(self, m):
        self.outputs[m] = self.stage(self.inputs[m])
        super().backward(m)


class KeepsOutputs(Right1F1B):
    """As in my_gpipe: a list to which outputs are added, and from which none is taken."""

    def backward(self, m):
        self.all_outputs = [*getattr(self, "all_outputs", []), self.outputs[m]]
        super().backward(m)


class KeepsClones(Right1F1B):
    """The graphs go, and the numbers stay."""

    def backward(self, m):
        self.all_outputs = [*getattr(self, "all_outputs", []), self.outputs[m].detach().clone()]
        super().backward(m)


class TakesTheLatestOutput(Right1F1B):
    """The outputs are a stack."""

    def backward(self, m):
        latest = max(self.outputs)
        self.outputs[m], self.outputs[latest] = self.outputs[latest], self.outputs[m]
        super().backward(m)


class AveragedTwice1F1B(Right1F1B):
    weight = AveragedTwice.weight


class Unweighted1F1B(Right1F1B):
    weight = Unweighted.weight


# The last entry: the fewest ranks on which the mistake can be seen.
class NeverWaits(Right1F1B):
    def send(self, tensor, dest, m):
        self.comm.send(tensor, dest, async_op=True)


class WaitsForActivationsAlone(Right1F1B):
    """The handles of gradients are dropped."""

    def send(self, tensor, dest, m):
        sent = self.comm.send(tensor, dest, async_op=True)
        self.sending += [sent] if dest > self.comm.rank else []


class WarmsUpForThree(Right1F1B):
    """One forward pass more in hand than two ranks need."""

    def run(self, count):
        ahead = min(2 - self.comm.rank, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)


WRONG = {
    "1f1b-build": {
        does_nothing: ("no-forward", 2),
        Step: ("too-many-activations", 2),  # GPipe
        OneTooManyAhead: ("too-many-activations", 2),
        SameWarmUpEverywhere: ("too-many-activations", 2),
        KeepsGraphs: ("activations-kept", 2),
        ComputesAgain: ("recomputed", 2),
        KeepsOutputs: ("outputs-kept", 2),
        KeepsClones: ("outputs-kept", 2),
        NoWarmUp: ("bubble", 2),
        SendsThatWait: ("long-messages", 2),
        SendsAfterTheBackwardPass: ("sent-late", 2),
        WarmUpTheWrongWayRound: ("waited", 2),
        ManyMicrobatchesOnly: ("few-microbatches", 3),
        TailForgotten: ("microbatch-lost", 2),
        TakesTheLatestOutput: ("no-input-gradient", 3),
        AveragedTwice1F1B: ("averaged-twice", 2),
        Unweighted1F1B: ("unweighted", 2),
        NeverWaits: ("not-waited", 2),
        WaitsForActivationsAlone: ("not-waited", 2),
        WarmsUpForThree: "other-size",
    },
}  # fmt: skip
