"""Plausible wrong steps of a pipeline, and the mistake that the check must recognise in each."""

import torch

from dtlib.parallel.pipeline import PipelineStage, ScheduleGPipe

# fix: train_step(comm, stage, x, target)


def train(comm, stage, x, target, loss_fn, microbatches=4):
    schedule = ScheduleGPipe(PipelineStage(stage, comm.rank, comm.size, comm), microbatches, loss_fn)
    if comm.rank == 0:
        schedule.step(x, target=target)
    else:
        schedule.step(target=target)


def mean_square(output, target):
    return (output - target).square().mean()


def trains_as_it_was(comm, stage, x, target):
    """The planted bug: the schedule divides already."""
    train(comm, stage, x, target, lambda output, wanted: mean_square(output, wanted) / 4)


def trains_with_a_sum(comm, stage, x, target):
    """Half fixed: the loss is no mean any more."""
    train(comm, stage, x, target, lambda output, wanted: mean_square(output, wanted) * 4)


def trains_with_one_microbatch(comm, stage, x, target):
    """One division by one is none: but then it is no pipeline."""
    train(comm, stage, x, target, mean_square, microbatches=1)


def trains_with_the_last_stage_fixed(comm, stage, x, target):
    trains_as_it_was(comm, stage, x, target)
    if comm.rank == comm.size - 1:
        for parameter in stage.parameters():
            parameter.grad *= 4


def trains_with_two_microbatches(comm, stage, x, target):
    train(comm, stage, x, target, mean_square, microbatches=2)


def trains_with_samples_counted_again(comm, stage, x, target):
    train(comm, stage, x, target, lambda output, wanted: mean_square(output, wanted) * len(output) / 4)


def trains_with_a_sum_over_features(comm, stage, x, target):
    """On small micro-batches as much as if they came twice."""
    train(comm, stage, x, target, lambda output, wanted: (output - wanted).square().mean(0).sum())


def trains_with_a_mean_of_means(comm, stage, x, target):
    """The mean has divided by the samples already."""
    train(comm, stage, x, target, lambda output, wanted: mean_square(output, wanted) / len(output))


def trains_with_a_sum_of_squares(comm, stage, x, target):
    train(comm, stage, x, target, lambda output, wanted: (output - wanted).square().sum() / 4)


def trains_with_another_loss(comm, stage, x, target):
    train(comm, stage, x, target, lambda output, wanted: (output - wanted).abs().mean())


def trains_on_three_ranks(comm, stage, x, target):
    """The number of stages is written in."""
    schedule = ScheduleGPipe(PipelineStage(stage, comm.rank, 3, comm), 4, mean_square)
    if comm.rank == 0:
        schedule.step(x, target=target)
    else:
        schedule.step(target=target)


# build: my_gpipe(comm, stage, inputs, targets, loss_fn)


class Step:
    """A step with its pieces to turn. ``Step(...)(comm, stage, inputs, targets, loss_fn)`` is right as it stands."""

    order = "gpipe"
    async_op = True

    def __call__(self, comm, stage, inputs, targets, loss_fn):
        self.comm, self.stage, self.inputs, self.targets, self.loss_fn = comm, stage, inputs, targets, loss_fn
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self.outputs, self.sending, self.loss = {}, [], 0.0
        self.run(len(inputs))
        for handle in self.sending:
            handle.wait()
        return self.loss

    def run(self, count):
        ahead = count if self.order == "gpipe" else min(self.comm.size - self.comm.rank - 1, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)

    def forward(self, m):
        if not self.first:
            self.comm.recv(self.inputs[m], self.comm.rank - 1)
            self.inputs[m].requires_grad_()
        self.outputs[m] = self.stage(self.inputs[m])
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)

    def backward(self, m):
        if self.last:
            loss = self.loss_fn(self.outputs[m], self.target(m)) * self.weight(m)
            self.loss += loss.item()
            loss.backward()
        else:
            gradient = torch.empty_like(self.outputs[m])
            self.comm.recv(gradient, self.comm.rank + 1)
            self.outputs[m].backward(gradient)
        del self.outputs[m]
        if not self.first:
            self.send(self.inputs[m].grad, self.comm.rank - 1, m)

    def target(self, m):
        return self.targets[m]

    def weight(self, m):
        return len(self.inputs[m]) / sum(map(len, self.inputs))

    def send(self, tensor, dest, m):
        sent = self.comm.send(tensor, dest, async_op=self.async_op)
        self.sending += [sent] if self.async_op else []


class NotAveraged(Step):
    def weight(self, m):
        return 1.0


class AveragedTwice(Step):
    def weight(self, m):
        return Step.weight(self, m) / len(self.inputs)


class Unweighted(Step):
    def weight(self, m):
        return 1 / len(self.inputs)


class DividesOnTheWay(Step):
    """Every rank divides once more before it sends a gradient on."""

    def send(self, tensor, dest, m):
        super().send(tensor / len(self.inputs) if dest < self.comm.rank else tensor, dest, m)


class TargetsMixedUp(Step):
    def target(self, m):
        return self.targets[m - 1][: len(self.inputs[m])].expand_as(self.outputs[m])


class AnotherGradientSent(Step):
    """What goes back belongs to the micro-batch before."""

    def send(self, tensor, dest, m):
        super().send(self.inputs[max(0, m - 1)].grad if dest < self.comm.rank else tensor, dest, m)


class GradientNotANumber(Step):
    """What comes back is thrown away."""

    def backward(self, m):
        if not self.last:
            self.comm.recv(torch.empty_like(self.outputs[m]), self.comm.rank + 1)
            self.outputs[m] = self.outputs[m] * float("nan")
            self.outputs[m].sum().backward()
            if not self.first:
                self.send(self.inputs[m].grad, self.comm.rank - 1, m)
            return
        super().backward(m)


class LossNotANumber(Step):
    def backward(self, m):
        super().backward(m)
        self.loss = float("nan")


class GradientsNotAskedFor(Step):
    """x.grad stays None."""

    def forward(self, m):
        if not self.first:
            self.comm.recv(self.inputs[m], self.comm.rank - 1)
        self.outputs[m] = self.stage(self.inputs[m])
        if not self.last:
            self.send(self.outputs[m].detach(), self.comm.rank + 1, m)


class GradientLost(Step):
    """zero_grad in the wrong place: the first backward passes are for nothing."""

    def backward(self, m):
        if m == len(self.inputs) - 1:
            self.stage.zero_grad()
        super().backward(m)


class LastMicrobatchForgotten(Step):
    def run(self, count):
        super().run(count - 1)


class NoBackward(Step):
    def backward(self, m):
        self.loss += 0.0


class LossOfTheLastMicrobatch(Step):
    def backward(self, m):
        self.loss = 0.0
        super().backward(m)


def does_nothing(comm, stage, inputs, targets, loss_fn):
    return 0.0


# handed in as GPipe, and the beginning of wrong answers to my_1f1b (wrong_one_f_one_b.py)


class Right1F1B(Step):
    order = "1f1b"


# The last entry: the fewest ranks on which the mistake can be seen.


class LastIsRank2(Step):
    def run(self, count):
        self.last = self.comm.rank == 2
        super().run(count)


WRONG = {
    "pipeline-fix": {
        trains_as_it_was: ("averaged-twice", 2),
        trains_with_a_sum: ("not-averaged", 2),
        trains_with_one_microbatch: ("no-microbatches", 2),
        trains_with_two_microbatches: ("other-microbatches", 2),
        trains_with_the_last_stage_fixed: ("averaged-twice", 2),
        trains_with_samples_counted_again: ("scaled", 2),
        trains_with_a_sum_over_features: ("scaled", 2),
        trains_with_a_mean_of_means: ("scaled", 2),
        trains_with_a_sum_of_squares: ("scaled", 2),
        trains_with_another_loss: ("other-loss", 2),
        trains_on_three_ranks: ("other-size", 3),
    },
    "gpipe-build": {
        does_nothing: ("no-forward", 2),
        NotAveraged: ("not-averaged", 2),
        AveragedTwice: ("averaged-twice", 2),
        Unweighted: ("unweighted", 2),
        DividesOnTheWay: ("averaged-twice", 2),
        TargetsMixedUp: ("mixed-up", 2),
        AnotherGradientSent: ("mixed-up", 2),
        GradientNotANumber: ("mixed-up", 2),
        LossNotANumber: ("other-loss", 2),
        GradientsNotAskedFor: ("no-input-gradient", 2),
        GradientLost: ("microbatch-lost", 2),
        LastMicrobatchForgotten: ("forward-count", 2),
        NoBackward: ("no-gradient", 2),
        LossOfTheLastMicrobatch: ("other-loss", 2),
        LastIsRank2: "other-size",
    },
}  # fmt: skip
