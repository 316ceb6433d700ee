"""Plausible wrong ways to find the leaks, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import cross_entropy

# fix: ShardedSteps(comm, model) with step(x, y)


class StepsAsTheyWere:
    """The two leaks: buckets in a list that nobody clears, and a row that keeps its whole output."""

    def __init__(self, comm, model):
        self.comm, self.model = comm, model
        self.shards, self.sent, self.guesses = {}, [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter):
        length = -(-parameter.numel() // self.comm.size)
        flat = torch.zeros(length * self.comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        parameter.grad = None
        own = self.shards[parameter] = torch.empty(length, dtype=parameter.dtype)
        handle = self.comm.reduce_scatter(own, flat, op="mean", async_op=True)
        self.sent.append((handle, flat))

    def step(self, x, y):
        output = self.model(x)
        loss = cross_entropy(output, y)
        loss.backward()
        self.wait()
        self.guesses.append(self.guess(output))
        return loss.item()

    def wait(self):
        for handle, _ in self.sent:
            handle.wait()

    def guess(self, output):
        return output[0].detach()


class StepsWithViews(StepsAsTheyWere):
    """The buckets are freed, the outputs are not."""

    def wait(self):
        super().wait()
        self.sent.clear()


class StepsWithBuckets(StepsAsTheyWere):
    """The guesses have memory of their own, and buckets stay."""

    def guess(self, output):
        return output[0].detach().clone()


class StepsClearedTooEarly(StepsWithBuckets):
    """At the beginning of a step: what the last one has sent stays."""

    def step(self, x, y):
        self.sent.clear()
        return super().step(x, y)


class StepsNotWaited(StepsWithBuckets):
    """Cleared, and not waited for: shards have not arrived."""

    def wait(self):
        self.sent.clear()
        for shard in self.shards.values():
            shard.zero_()


class StepsWithoutShards(StepsWithBuckets):
    """What takes memory is thrown away, shards too."""

    def wait(self):
        super().wait()
        self.sent.clear()
        self.shards.clear()


class StepsWithoutGuesses(StepsWithBuckets):
    def wait(self):
        super().wait()
        self.sent.clear()

    def step(self, x, y):
        self.guesses.clear()
        return super().step(x, y)


class StepsWithoutLeaks(StepsWithBuckets):
    """Right as it stands, for others to turn a piece of it."""

    def wait(self):
        super().wait()
        self.sent.clear()


class StepsClearedNowAndThen(StepsWithBuckets):
    """Every second step, the last among them: before it there is more."""

    def wait(self):
        super().wait()
        if len(self.guesses) % 2:
            self.sent.clear()


class StepsThatSkip(StepsWithBuckets):
    """All are waited for, but a loop over a list that it shortens leaves every second handle there."""

    def wait(self):
        super().wait()
        for pair in self.sent:
            self.sent.remove(pair)


class StepsWithWholeGuesses(StepsWithoutLeaks):
    """A copy with memory of its own, of more than the row."""

    def guess(self, output):
        return output.detach().clone()


class StepsWithRoundedGuesses(StepsWithoutLeaks):
    """A copy only where the net has another dtype."""

    def guess(self, output):
        return output[0].detach().float()


class StepsWithArrays(StepsWithoutLeaks):
    """An array of numpy is a view, too."""

    def guess(self, output):
        return output[0].detach().numpy()


class StepsWithoutACopy(StepsWithoutLeaks):
    """A row is contiguous already: no copy is made."""

    def guess(self, output):
        return output[0].detach().contiguous()


class StepsOnTheModel(StepsWithoutLeaks):
    """Guesses with memory of their own; the outputs are somewhere else, as numbers."""

    def guess(self, output):
        vars(self.model).setdefault("outputs", []).extend(output.tolist())
        return super().guess(output)


class StepsWithSlices(StepsWithoutLeaks):
    """No list and no handle; but each shard is a view of its bucket."""

    def gradient_is_ready(self, parameter):
        length = -(-parameter.numel() // self.comm.size)
        flat = torch.zeros(length * self.comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        parameter.grad = None
        self.comm.all_reduce(flat, op="mean")
        self.shards[parameter] = flat[self.comm.rank * length :][:length]


class StepsWithTheLastOutput(StepsWithoutLeaks):
    def guess(self, output):
        self.output = output
        return super().guess(output)


class StepsThatAddUp(StepsWithoutLeaks):
    """Gradients that nobody frees are added to in the next step."""

    def gradient_is_ready(self, parameter):
        gradient = parameter.grad
        super().gradient_is_ready(parameter)
        parameter.grad = gradient


class StepsWithOneRow(StepsWithBuckets):
    """The first row of a tensor that is written over."""

    def wait(self):
        super().wait()
        self.sent.clear()

    def guess(self, output):
        self.room = getattr(self, "room", torch.empty(10, dtype=output.dtype))
        self.room.copy_(output[0].detach() + 1)
        return self.room


class StepsWithLosses(StepsWithBuckets):
    """No leak of the two, and a new one: losses with their graphs, and the batches that a closure refers to."""

    def wait(self):
        super().wait()
        self.sent.clear()

    def step(self, x, y):
        self.later = [*getattr(self, "later", []), lambda: self.model(x)]
        return super().step(x, y)


class StepsWithGradients(StepsWithBuckets):
    """The gradients stay where autograd puts them."""

    def wait(self):
        super().wait()
        self.sent.clear()

    def step(self, x, y):
        self.model.zero_grad()
        return super().step(x, y)

    def gradient_is_ready(self, parameter):
        gradient = parameter.grad
        super().gradient_is_ready(parameter)
        parameter.grad = gradient


class StepsWithoutALoss(StepsWithBuckets):
    def wait(self):
        super().wait()
        self.sent.clear()

    def step(self, x, y):
        super().step(x, y)


WRONG = {
    "zero-leak": {
        StepsAsTheyWere: "both-kept",
        StepsWithViews: "outputs-kept",
        StepsWithBuckets: "buckets-kept",
        StepsClearedTooEarly: "last-step-kept",
        StepsNotWaited: "not-arrived",
        StepsWithoutShards: "no-shard",
        StepsWithoutGuesses: "no-guess",
        StepsClearedNowAndThen: "some-steps-kept",
        StepsThatSkip: "last-step-kept",
        StepsWithWholeGuesses: "guess-length",
        StepsWithRoundedGuesses: "rounded-guess",
        StepsWithArrays: "outputs-kept",
        StepsWithoutACopy: "outputs-kept",
        StepsOnTheModel: "outputs-elsewhere",
        StepsWithSlices: "shards-are-views",
        StepsWithTheLastOutput: "last-step-kept",
        StepsThatAddUp: "gradients-kept",
        StepsWithOneRow: "other-guess",
        StepsWithLosses: "something-grows",
        StepsWithGradients: "gradients-kept",
        StepsWithoutALoss: "no-loss",
    },
}
