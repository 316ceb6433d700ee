"""Plausible wrong recoveries, and the mistake that the check must recognise in each."""

import copy

import torch
from torch import nn

import dtlib
from dtlib.lessons.l11b.simulated_death import shrunk
from dtlib.recovery.shrink import failure_of_a_rank


def step_on(comm, model, optimizer, batch, rank=None, size=None):
    """One step of the right answer; ``rank`` and ``size`` are the communicator's, unless told otherwise."""
    rank, size = comm.rank if rank is None else rank, comm.size if size is None else size
    x, y = batch
    mine = slice(len(x) * rank // size, len(x) * (rank + 1) // size)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[mine]), y[mine]) * len(x[mine]) / len(x)
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    comm.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    optimizer.step()


def right(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps)


def recovering(
    comm, model, optimizer, batch_of, steps, agree=None, take_step=step_on, caught=failure_of_a_rank, ends=True
):
    """The right answer, with pieces to turn: ``agree(comm, model, optimizer, step)`` after a death returns the step."""
    step, failed = 0, False
    while True:
        try:
            if failed:
                step = (agree or take_rank_0s)(comm, model, optimizer, step)
            while step < steps:
                take_step(comm, model, optimizer, batch_of(step))
                step += 1
            if ends:
                comm.barrier()
            return
        except Exception as error:
            if not caught(error):
                raise
            comm, failed = shrunk(comm), True


def take_rank_0s(comm, model, optimizer, step):
    state = comm.broadcast_object((model.state_dict(), optimizer.state_dict(), step))
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return state[2]


# fix: train_after_deaths


def keeps_its_own_step(comm, model, optimizer, batch_of, steps):
    """The planted bug: everybody has rank 0's state, and its own step."""

    def agree(comm, model, optimizer, step):
        take_rank_0s(comm, model, optimizer, step)
        return step

    recovering(comm, model, optimizer, batch_of, steps, agree)


def takes_the_latest_step(comm, model, optimizer, batch_of, steps):
    def agree(comm, model, optimizer, step):
        take_rank_0s(comm, model, optimizer, step)
        return max(comm.all_gather_object(step))

    recovering(comm, model, optimizer, batch_of, steps, agree)


def takes_the_earliest_step(comm, model, optimizer, batch_of, steps):
    def agree(comm, model, optimizer, step):
        take_rank_0s(comm, model, optimizer, step)
        return min(comm.all_gather_object(step))

    recovering(comm, model, optimizer, batch_of, steps, agree)


def skips_the_step_that_failed(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, lambda *arguments: take_rank_0s(*arguments) + 1)


def leaves_early(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, ends=False)


# build: shrink_and_go_on


def forgets_the_momentum(comm, model, optimizer, batch_of, steps):
    def agree(comm, model, optimizer, step):
        for parameter in model.parameters():
            comm.broadcast(parameter.data)
        return comm.broadcast_object(step)

    recovering(comm, model, optimizer, batch_of, steps, agree)


def makes_the_optimizer_anew(comm, model, optimizer, batch_of, steps):
    def agree(comm, model, optimizer, step):
        step = take_rank_0s(comm, model, optimizer, step)
        optimizer.state.clear()
        return step

    recovering(comm, model, optimizer, batch_of, steps, agree)


def takes_nothing(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, lambda comm, model, optimizer, step: step)


def tells_the_step_alone(comm, model, optimizer, batch_of, steps):
    recovering(
        comm, model, optimizer, batch_of, steps, lambda comm, model, optimizer, step: comm.broadcast_object(step)
    )


def begins_again(comm, model, optimizer, batch_of, steps):
    def agree(*arguments):
        take_rank_0s(*arguments)
        return 0

    recovering(comm, model, optimizer, batch_of, steps, agree)


def keeps_its_slice(comm, model, optimizer, batch_of, steps):
    """What the dead rank had is seen by nobody."""
    rank, size = comm.rank, comm.size

    def take_step(comm, model, optimizer, batch):
        step_on(comm, model, optimizer, batch, rank, size)

    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def catches_everything(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, caught=lambda error: True)


def does_not_recover(comm, model, optimizer, batch_of, steps):
    for step in range(steps):
        step_on(comm, model, optimizer, batch_of(step))


def survives_one_death(comm, model, optimizer, batch_of, steps):
    step = 0
    try:
        while step < steps:
            step_on(comm, model, optimizer, batch_of(step))
            step += 1
        comm.barrier()
    except Exception as error:
        if not failure_of_a_rank(error):
            raise
        comm = shrunk(comm)
        for left in range(take_rank_0s(comm, model, optimizer, step), steps):
            step_on(comm, model, optimizer, batch_of(left))


def returns_after_a_death(comm, model, optimizer, batch_of, steps):
    try:
        does_not_recover(comm, model, optimizer, batch_of, steps)
    except Exception as error:
        if not failure_of_a_rank(error):
            raise


def starts_over(comm, model, optimizer, batch_of, steps):
    """Right, and all that was done is done again."""
    first = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def agree(comm, model, optimizer, step):
        model.load_state_dict(first[0])
        optimizer.load_state_dict(copy.deepcopy(first[1]))
        return 0

    recovering(comm, model, optimizer, batch_of, steps, agree)


def takes_rank_1s(comm, model, optimizer, batch_of, steps):
    """Until one rank alone is left."""

    def agree(comm, model, optimizer, step):
        state = comm.broadcast_object((model.state_dict(), optimizer.state_dict(), step), root=1)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        return state[2]

    recovering(comm, model, optimizer, batch_of, steps, agree)


def asks_the_world(comm, model, optimizer, batch_of, steps):
    """Of which the dead are members."""

    def agree(comm, model, optimizer, step):
        return take_rank_0s(dtlib.init().comm, model, optimizer, step)

    recovering(comm, model, optimizer, batch_of, steps, agree)


def step_by(share, loss_of, reduce=lambda comm, gradient: comm.all_reduce(gradient)):
    """A step on ``share(comm, samples)`` of a batch, with the gradients of ``loss_of(mean, mine, samples, comm)``."""

    def take_step(comm, model, optimizer, batch):
        x, y = batch
        mine = share(comm, len(x))
        optimizer.zero_grad()
        mean = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss_of(mean, len(x[mine]), len(x), comm).backward()
        for parameter in model.parameters():
            reduce(comm, parameter.grad)
        optimizer.step()

    return take_step


def dealt(comm, samples):
    return slice(comm.rank, None, comm.size)


def of_the_whole(mean, mine, samples, comm):
    return mean * mine / samples


def nobody_is_asked(comm, model, optimizer, batch_of, steps):
    """The whole batch on every rank, and no messages: nobody can die."""
    take_step = step_by(lambda comm, samples: slice(None), lambda mean, *_: mean, lambda comm, gradient: None)
    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def each_on_its_own(comm, model, optimizer, batch_of, steps):
    """Its own part of the batch, and no messages."""
    take_step = step_by(dealt, of_the_whole, lambda comm, gradient: None)
    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def gathers_gradients(comm, model, optimizer, batch_of, steps):
    """Right values, by another operation."""

    def gathered(comm, gradient):
        gradient.copy_(sum(comm.all_gather_object(gradient.clone())))

    recovering(comm, model, optimizer, batch_of, steps, take_step=step_by(dealt, of_the_whole, gathered))


def the_whole_batch(comm, model, optimizer, batch_of, steps):
    """The mean over ranks of the same gradients."""

    def mean(comm, gradient):
        comm.all_reduce(gradient, op="mean")

    take_step = step_by(lambda comm, samples: slice(None), lambda mean, *_: mean, mean)
    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def alone_after_a_death(comm, model, optimizer, batch_of, steps):
    """As soon as a rank is missing, each of the others trains by itself."""
    first, together = comm.size, step_by(dealt, of_the_whole)
    by_itself = step_by(lambda comm, samples: slice(None), lambda mean, *_: mean, lambda comm, gradient: None)

    def take_step(comm, *rest):
        (together if comm.size == first else by_itself)(comm, *rest)

    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def mean_of_means(comm, model, optimizer, batch_of, steps):
    take_step = step_by(dealt, lambda mean, mine, samples, comm: mean / comm.size)
    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def sum_of_means(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, take_step=step_by(dealt, lambda mean, *_: mean))


def divides_twice(comm, model, optimizer, batch_of, steps):
    take_step = step_by(dealt, lambda mean, mine, samples, comm: mean * mine / samples / comm.size)
    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def drops_the_rest(comm, model, optimizer, batch_of, steps):
    def share(comm, samples):
        each = round(samples / comm.size)  # of 13, on two ranks 6
        return slice(comm.rank * each, (comm.rank + 1) * each)

    recovering(comm, model, optimizer, batch_of, steps, take_step=step_by(share, of_the_whole))


def one_sample_too_many(comm, model, optimizer, batch_of, steps):
    def share(comm, samples):
        each = samples // comm.size
        return slice(comm.rank * each, (comm.rank + 1) * each + 1)

    recovering(comm, model, optimizer, batch_of, steps, take_step=step_by(share, of_the_whole))


def leaves_early_after_many_calls(comm, model, optimizer, batch_of, steps):
    """A message for each parameter: who has the last of them leaves."""
    recovering(comm, model, optimizer, batch_of, steps, take_step=step_by(dealt, of_the_whole), ends=False)


def tells_the_step_alone_after_many_calls(comm, model, optimizer, batch_of, steps):
    def agree(comm, model, optimizer, step):
        return comm.broadcast_object(step)

    recovering(comm, model, optimizer, batch_of, steps, agree, step_by(dealt, of_the_whole))


def waits_at_the_end(comm, model, optimizer, batch_of, steps):
    """Parameters are right; then rank 0 calls a barrier that nobody else calls."""
    used = []

    def take_step(comm, *rest):
        used[:] = [comm]
        step_on(comm, *rest)

    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)
    if used[0] is not comm and used[0].rank == 0:
        used[0].barrier()


def keeps_a_failed_gradient(comm, model, optimizer, batch_of, steps):
    """Gradients are made zero behind a step; a step that fails leaves its own."""

    def take_step(comm, model, optimizer, batch):
        x, y = batch
        mine = dealt(comm, len(x))
        (nn.functional.cross_entropy(model(x[mine]), y[mine]) * len(x[mine]) / len(x)).backward()
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


# right, and unusual


def takes_the_latest_state(comm, model, optimizer, batch_of, steps):
    """From the rank that was furthest; a mean over ranks that is made a sum; samples one by one."""

    def agree(comm, model, optimizer, step):
        all_steps = comm.all_gather_object(step)
        root = all_steps.index(max(all_steps))
        state = comm.broadcast_object((model.state_dict(), optimizer.state_dict(), step), root=root)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        return state[2]

    def take_step(comm, model, optimizer, batch):
        optimizer.zero_grad()
        for place in range(comm.rank, len(batch[0]), comm.size):
            x, y = batch[0][place : place + 1], batch[1][place : place + 1]
            (nn.functional.cross_entropy(model(x), y) * comm.size / len(batch[0])).backward()
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
        with torch.no_grad():
            nn.functional.cross_entropy(model(batch[0]), batch[1])  # only looked at

    recovering(comm, model, optimizer, batch_of, steps, agree, take_step)


def averages_steps(comm, model, optimizer, batch_of, steps):
    """Rank 0's state, and the rounded mean of all steps: 2.5 becomes 2, and 3.5 becomes 4."""

    def agree(comm, model, optimizer, step):
        take_rank_0s(comm, model, optimizer, step)
        everyones = comm.all_gather_object(step)
        return round(sum(everyones) / len(everyones))

    recovering(comm, model, optimizer, batch_of, steps, agree)


WRONG = {
    "resume-fix": {
        keeps_its_own_step: "one-step-apart",
        takes_the_latest_step: "step-lost",
        takes_the_earliest_step: "step-twice",
        skips_the_step_that_failed: "step-lost",
        leaves_early: "left-early",
        asks_the_world: "world-comm",
        takes_rank_1s: "no-such-root",
        survives_one_death: "one-death-only",
        starts_over: "steps-redone",
        the_whole_batch: "whole-batch",
        drops_the_rest: "rest-dropped",
        averages_steps: "step-lost",
    },
    "shrink-build": {
        forgets_the_momentum: "ranks-differ",
        makes_the_optimizer_anew: "momentum-lost",
        waits_at_the_end: "out-of-step",
        leaves_early_after_many_calls: "left-early",
        tells_the_step_alone_after_many_calls: "ranks-differ",
        takes_nothing: "one-step-apart",
        tells_the_step_alone: "ranks-differ",
        begins_again: "from-the-beginning",
        keeps_its_slice: "other-batch",
        catches_everything: "swallowed",
        does_not_recover: "not-recovered",
        leaves_early: "left-early",
        survives_one_death: "one-death-only",
        returns_after_a_death: "gave-up",
        starts_over: "steps-redone",
        takes_rank_1s: "no-such-root",
        asks_the_world: "world-comm",
        nobody_is_asked: "whole-batch",
        gathers_gradients: "no-exchange",
        each_on_its_own: "wrong-without-death",
        the_whole_batch: "whole-batch",
        alone_after_a_death: "whole-batch",
        mean_of_means: "mean-of-means",
        sum_of_means: "sum-of-means",
        divides_twice: "scaled",
        drops_the_rest: "rest-dropped",
        one_sample_too_many: "samples-twice",
        keeps_a_failed_gradient: "other-mean",
    },
}
