"""Plausible wrong recoveries, and the mistake that the check must recognise in each."""

import torch
from torch import nn

from dtlib.lab.lessons.l11b.simulated_death import shrunk
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


# mend: train_after_deaths


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


def averages_over_ranks(comm, model, optimizer, batch_of, steps):
    """The sum of the means over slices."""

    def take_step(comm, model, optimizer, batch):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * comm.size
        step_on(comm, model, optimizer, batch)

    recovering(comm, model, optimizer, batch_of, steps, take_step=take_step)


def catches_everything(comm, model, optimizer, batch_of, steps):
    recovering(comm, model, optimizer, batch_of, steps, caught=lambda error: True)


def does_not_recover(comm, model, optimizer, batch_of, steps):
    for step in range(steps):
        step_on(comm, model, optimizer, batch_of(step))


WRONG = {
    "resume-mend": {
        keeps_its_own_step: "one-step-apart",
        takes_the_latest_step: "step-lost",
        takes_the_earliest_step: "step-twice",
        skips_the_step_that_failed: "step-lost",
        leaves_early: "left-early",
    },
    "shrink-build": {
        forgets_the_momentum: "ranks-differ",
        takes_nothing: "one-step-apart",
        tells_the_step_alone: "ranks-differ",
        begins_again: "from-the-beginning",
        keeps_its_slice: "other-batch",
        averages_over_ranks: "wrong-without-death",
        catches_everything: "swallowed",
        does_not_recover: "not-recovered",
        leaves_early: "left-early",
    },
}
