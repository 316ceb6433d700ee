"""Plausible wrong repairs of a step that holds too much memory, and the mistake that the check must recognise."""

import gc

import torch

from tests.lessons.l07.wrong_pipelines import Step


class Repair(Step):
    """The step with its pieces to turn; as it stands it is right."""

    first_drop = last_drop = True  # whether handles are dropped, of messages to the rank after and before
    seen = True  # whether the end of a send is looked for
    async_op = True
    ahead = None

    def __call__(self, comm, stage, microbatches, like, loss_fn):
        self.comm, self.stage, self.like, self.loss_fn = comm, stage, like, loss_fn
        self.microbatches, self.count = microbatches, len(microbatches)
        self.kept, self.sending, self.losses, self.means = {}, [], [], []
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        ahead = min(comm.size - comm.rank - 1, self.count) if self.ahead is None else self.ahead
        for m in range(ahead):
            self.forward(m)
        for m in range(self.count):
            if m + ahead < self.count:
                self.forward(m + ahead)
            self.backward(m)
        for handle, _ in self.sending:
            handle.wait()
        return sum(self.losses), self.result()

    def forward(self, m):
        x, target = self.microbatches[m]
        if not self.first:
            x = self.comm.recv(torch.empty_like(self.like), self.comm.rank - 1).requires_grad_()
        output = self.stage(x)
        self.log(output)
        y = output
        if self.last:
            y = self.loss_fn(output, target) / self.count
            self.losses.append(y.detach())
        else:
            self.send(output.detach(), self.comm.rank + 1)
        self.kept[m] = x, y
        self.drop()

    def backward(self, m):
        x, y = self.take(m)
        y.backward(None if self.last else self.comm.recv(torch.empty_like(self.like), self.comm.rank + 1))
        if not self.first:
            self.send(x.grad, self.comm.rank - 1)
        self.drop()

    def take(self, m):
        return self.kept.pop(m)

    def send(self, tensor, dest):
        sent = self.comm.send(tensor, dest, async_op=self.async_op)
        if self.async_op:
            self.sending.append((sent, dest))

    def drop(self):
        self.sending = [(handle, dest) for handle, dest in self.sending if not self.goes(handle, dest)]

    def goes(self, handle, dest):
        wanted = self.first_drop if dest > self.comm.rank else self.last_drop
        return wanted and (not self.seen or handle.done())

    def log(self, output):
        self.means.append(output.detach().abs().mean())

    def result(self):
        return [mean.item() for mean in self.means]


class Later(Repair):
    """Logs by functions that run at the end."""

    def log(self, output):
        self.means.append(lambda: output.abs().mean())

    def result(self):
        return [mean().item() for mean in self.means]


class AsItWas(Later):
    first_drop = last_drop = False


class OnlyTheFunctions(Repair):
    """The second holder of the same memory is still there."""

    first_drop = last_drop = False


class OnlyTheHandles(Later):
    pass


class OnlyHandlesOfOutputs(Repair):
    last_drop = False


class AsADefault(Later):
    """A default argument is kept like what a function names."""

    def log(self, output):
        self.means.append(lambda output=output: output.abs().mean())


class DetachedForLater(Later):
    """Another tensor, the same memory."""

    def log(self, output):
        detached = output.detach()
        self.means.append(lambda: detached.abs().mean())


class CopiedForLater(Later):
    """Other memory, as much of it."""

    def log(self, output):
        copied = output.detach().clone()
        self.means.append(lambda: copied.abs().mean())


class OnTheStage(Repair):
    """The list has a name that a stage could have."""

    def log(self, output):
        super().log(output)
        vars(self.stage).setdefault("outputs", []).append(output.detach())


class AsArrays(Repair):
    """Memory of numpy's, as much of it."""

    def log(self, output):
        self.means.append(output.detach().numpy().copy())

    def result(self):
        return [float(abs(mean).mean()) for mean in self.means]


class AsNumbers(AsArrays):
    """Memory of Python's, and more of it."""

    def log(self, output):
        self.means.append(output.flatten().tolist())

    def result(self):
        return [sum(map(abs, mean)) / len(mean) for mean in self.means]


class MeansWithGraphs(Repair):
    """A number, and the graph that leads to it."""

    def log(self, output):
        self.means.append(output.abs().mean())


class LossesWithGraphs(Repair):
    """A loss whose backward pass is over, and the graph that leads from its input."""

    def forward(self, m):
        super().forward(m)
        if self.last:
            self.losses[-1] = self.kept[m][1]


class TakesNothingOut(Repair):
    def take(self, m):
        return self.kept[m]


class MakesANameOfItsOwn(Repair):
    """An assignment to the list of the function around it."""

    def drop(self):
        sending = self.sending

        def drop():
            sending = [(handle, dest) for handle, dest in sending if not handle.done()]  # noqa: F823
            return sending

        self.sending = drop()


class DropsAnyMethod(Repair):
    """A method that is not called is true."""

    def goes(self, handle, dest):
        return bool(handle.done)


class CollectsGarbage(AsItWas):
    """What somebody refers to is no garbage."""

    def drop(self):
        gc.collect()


class DropsWithoutLooking(Repair):
    seen = False


class SendsAndWaits(Repair):
    """Without handles none is kept; but long messages wait for each other."""

    async_op = False


class NoLog(Repair):
    def log(self, output):
        pass


class LogsTheLoss(Repair):
    """A number, but another one."""

    def log(self, output):
        self.means.append(output.detach().mean())


class KeepsInputs(Repair):
    """With their gradients."""

    def take(self, m):
        x, y = self.kept.pop(m)
        self.done = [*getattr(self, "done", []), x]
        return x, y


class AllForwardFirst(Repair):
    """GPipe's order."""

    @property
    def ahead(self):
        return self.count


class KeepsAllOfALayer(Repair):
    """A row is a number of numbers, but a view of it keeps the whole."""

    def log(self, output):
        values = output.detach().abs()
        self.means.append(values.mean())
        self.rows = [*getattr(self, "rows", []), values[0]]


WRONG = {
    "leak-fix": {
        AsItWas: "output-held",
        OnlyTheFunctions: "memory-of-outputs",
        OnlyTheHandles: "output-held",
        OnlyHandlesOfOutputs: "memory-of-gradients",
        AsADefault: "output-held",
        DetachedForLater: "detached-held",
        OnTheStage: "detached-held",
        AsArrays: "other-memory",
        AsNumbers: "other-memory",
        MeansWithGraphs: "output-held",
        LossesWithGraphs: "inputs-held",
        TakesNothingOut: "output-held",
        MakesANameOfItsOwn: "local-name",
        DropsAnyMethod: "not-waited",
        CopiedForLater: "grows",
        CollectsGarbage: "output-held",
        DropsWithoutLooking: "not-waited",
        SendsAndWaits: "long-messages",
        NoLog: "no-means",
        LogsTheLoss: "other-means",
        KeepsInputs: "inputs-held",
        AllForwardFirst: "in-flight",
        KeepsAllOfALayer: "grows",
    },
}
