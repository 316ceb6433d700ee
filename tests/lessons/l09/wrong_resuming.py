"""Plausible wrong epochs of lesson 09 that are to be resumed, and the mistake that the check must recognise in each."""

# build: Epoch(order, batch_size, rank, ranks)


class Right:
    """What the others differ from in one thing."""

    def __init__(self, order, batch_size, rank, ranks):
        self.order, self.batch_size, self.rank, self.ranks, self.taken = order, batch_size, rank, ranks, 0

    def step(self):
        return self.batch_size * self.ranks

    def batch(self):
        return self.order[self.taken : self.taken + self.step()][self.rank :: self.ranks]

    def __iter__(self):
        while self.taken < len(self.order):
            batch = self.batch()
            self.taken = min(self.taken + self.step(), len(self.order))
            yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class CountsBatches(Right):
    """A batch of three ranks is not one of two."""

    def state_dict(self):
        return {"batches": -(-self.taken // self.step())}

    def load_state_dict(self, state):
        self.taken = state["batches"] * self.step()


class CountsItsOwnSamples(Right):
    def state_dict(self):
        return {"samples": self.taken // self.ranks}

    def load_state_dict(self, state):
        self.taken = state["samples"] * self.ranks


class CountsBehindTheYield(Right):
    def __iter__(self):
        while self.taken < len(self.order):
            yield self.batch()
            self.taken = min(self.taken + self.step(), len(self.order))


class ForgetsWhatWasLoaded(Right):
    """Right once: then it counts from the last resume."""

    since = 0

    def load_state_dict(self, state):
        self.taken = self.since = state["taken"]

    def state_dict(self):
        return {"taken": self.taken - self.since}


class NeverLoads(Right):
    def load_state_dict(self, state):
        pass


class SavesItsOwnRest(Right):
    def state_dict(self):
        return {"rest": self.order[self.taken :][self.rank :: self.ranks]}

    def load_state_dict(self, state):
        self.order = state["rest"]


class DropsTheLast(Right):
    def __iter__(self):
        while self.taken + self.step() <= len(self.order):
            batch = self.batch()
            self.taken += self.step()
            yield batch


class ReadsAhead(Right):
    """What was prepared counts, though nobody has had it."""

    def __iter__(self):
        ahead = []
        while self.taken < len(self.order) or ahead:
            while self.taken < len(self.order) and len(ahead) < 3:
                ahead.append(self.batch())
                self.taken = min(self.taken + self.step(), len(self.order))
            yield ahead.pop(0)


class AllOnEveryRank(Right):
    def batch(self):
        return self.order[self.taken : self.taken + self.batch_size]


class TakesTheWholeStep(Right):
    def batch(self):
        return self.order[self.taken : self.taken + self.step()]


class KeepsTheRest(Right):
    """What is left of the order, and of that again."""

    def __init__(self, order, batch_size, rank, ranks):
        super().__init__(order, batch_size, rank, ranks)
        self.rest = list(order)

    def __iter__(self):
        while self.rest:
            step, self.rest = self.rest[: self.step()], self.rest[self.step() :]
            yield step[self.rank :: self.ranks]

    def state_dict(self):
        return {"taken": len(self.order) - len(self.rest)}

    def load_state_dict(self, state):
        self.rest = self.rest[state["taken"] :]


class SavesASet(Right):
    def state_dict(self):
        return {"taken": {self.taken}}


class CountsFullSteps(Right):
    """A short last step is none."""

    full = 0

    def __iter__(self):
        while self.taken < len(self.order):
            batch, left = self.batch(), len(self.order) - self.taken
            self.taken += min(left, self.step())
            self.full += self.step() if left >= self.step() else 0
            yield batch

    def state_dict(self):
        return {"taken": self.full}

    def load_state_dict(self, state):
        self.taken = self.full = state["taken"]


class CountsItsOwnBatch(Right):
    """Ranks have unequally many in a short last step."""

    def __iter__(self):
        while batch := self.batch():
            self.taken += len(batch) * self.ranks
            yield batch


class CountsWhenItIterates(Right):
    """What was loaded is known as soon as somebody iterates."""

    loaded = 0

    def __iter__(self):
        self.taken = self.loaded
        return super().__iter__()

    def load_state_dict(self, state):
        self.loaded = state["taken"]


class PreparesTheFirst(Right):
    """As if the first batch had been had already."""

    begun = False

    def __iter__(self):
        for batch in super().__iter__():
            self.begun = True
            yield batch

    def state_dict(self):
        return {"taken": self.taken if self.begun else self.taken + self.step()}


class SharesTheBatchOut(Right):
    """batch_size is taken for the batch of all ranks."""

    def step(self):
        return self.batch_size


class NeverEnds(Right):
    def __iter__(self):
        yield from super().__iter__()
        while True:
            yield []


class YieldsNumbers(Right):
    def batch(self):
        return self.taken


WRONG = {
    "resume-build": {
        CountsBatches: "other-ranks",
        CountsItsOwnSamples: "other-ranks",
        CountsBehindTheYield: "batch-in-hand",
        ForgetsWhatWasLoaded: "second-resume",
        NeverLoads: "from-the-start",
        SavesItsOwnRest: "states-differ",
        DropsTheLast: "lost",
        ReadsAhead: "lost",
        AllOnEveryRank: "overlap",
        TakesTheWholeStep: "batch-size",
        KeepsTheRest: "loaded-later",
        SavesASet: "no-json",
        YieldsNumbers: "type",
        CountsFullSteps: "short-step",
        CountsItsOwnBatch: "states-differ",
        CountsWhenItIterates: "saved-unread",
        PreparesTheFirst: "saved-unread",
        SharesTheBatchOut: "small-batches",
        NeverEnds: "endless",
    },
}
