"""Observation of recoveries: the end of each rank, and its computations, in every case of deaths."""

import functools

from dtlib.errors import CommunicationError, WaitTimeout
from dtlib.lab.checks.world_guard import WorldCommUsed, refuse_world_comm
from dtlib.lessons.l11b.simulated_death import Apart, Death, Died, Endless, FaultyCommunicator, NoSuchRoot
from dtlib.recovery.shrink import failure_of_a_rank

STEPS = 6
SAMPLES = 13  # a prime, which no number of ranks divides
MISTAKE = "batch_of raises an error"
DEATHS = {
    "nobody dies": (),
    "the last rank dies in step 2": (Death(-1, 2),),
    "rank 0 dies in step 3": (Death(0, 3),),
    "the last rank dies in step 2, of which rank 1 has the result": (Death(-1, 2, (1,)),),
    "the last rank dies in step 3, of which rank 0 has the result": (Death(-1, 3, (0,)),),
    "the last rank dies in step 3, of which rank 1 has the result": (Death(-1, 3, (1,)),),  # a mean of 3.5 becomes 4
    "rank 0 dies in the last step, of which rank 1 has the result": (Death(0, STEPS - 1, (1,)),),
    "the last rank dies in step 0, and rank 0 of the others in step 4": (Death(-1, 0), Death(0, 4)),
}
ENDS = {kind.__name__: kind for kind in (Apart, Died, Endless, NoSuchRoot, WorldCommUsed)}


def make_model(seed: int = 0):
    """Return model and optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batch_of(step: int):
    """Return the batch of all ranks together in a step."""
    import torch

    chance = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 3, generator=chance, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


@functools.cache
def alone(skip=None, again=None, weights=None, forget=None) -> list:
    """Return the parameters of one process after training.

    Mistakes can be planted: step ``skip`` is left out, step ``again`` is done twice, samples have other ``weights``
    than 1 / SAMPLES, or momentum is cleared before step ``forget``.
    """
    import torch

    model, optimizer = make_model()
    for step in (each for each in range(STEPS) for _ in range(1 + (each == again)) if each != skip):
        x, y = batch_of(step)
        optimizer.zero_grad()
        if step == forget:
            optimizer.state.clear()
        of_samples = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        (of_samples @ torch.tensor(weights or [1 / SAMPLES] * SAMPLES, dtype=x.dtype)).backward()
        optimizer.step()
    return flat(model)


def flat(model) -> list:
    """Return all parameters as one list."""
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def observe(train, comm):
    """Return the end of this rank in each of ``DEATHS`` that this number of ranks allows, and for a planted error."""
    fits = {name: plan for name, plan in DEATHS.items() if comm.size > len(plan) + any(death.ahead for death in plan)}
    seen = []
    with refuse_world_comm():
        for name, plan in fits.items() if comm.size > 1 else ():
            # The death is in the last all_reduce of a step, so that ranks ahead of it have all results.
            calls = seen[0]["calls"] if seen else 1
            plan = [death._replace(call=max(0, calls - 1)) if death.ahead else death for death in plan]
            seen.append(_train(train, comm, name, plan))
            if any(comm.all_gather_object(seen[-1]["end"] in ("Apart", "waited", "WorldCommUsed"))):
                return seen  # otherwise ranks would wait for each other
        return [*seen, _train(train, comm, MISTAKE)] if seen else []


class _Mistake(Exception):
    """An error in the program, not of a rank, which an answer must not catch."""


def _train(train, comm, case: str, deaths=()) -> dict:
    """Run the answer in one case of deaths; return the observations of this rank.

    ``steps`` are the steps that it began, and ``samples`` the samples it computed in each, before and after each death.
    """
    import torch
    from mpi4py import MPI

    model, optimizer = make_model()
    part = comm.split(0)
    part.time_limit = comm.time_limit / 2  # so that waiting ranks reach the next case in time
    first = FaultyCommunicator(part, deaths)
    got = {"case": case, "steps": [[] for _ in range(len(deaths) + 1)], "samples": {}, "end": "returned"}
    of_step = {}

    def batch(step):
        if step not in range(STEPS):
            raise IndexError(f"batch_of({step!r}): steps are 0 to {STEPS - 1}")
        last = first.last()
        steps = got["steps"][min(last.shrinks, len(deaths))]
        if case == MISTAKE and step == 2 and len(steps) == 2:
            steps.append(step)
            raise _Mistake
        # Endless and Apart are BaseExceptions, so an answer that catches the failure of a rank does not catch them.
        if len(steps) > 3 * STEPS:
            raise Endless
        steps.append(step)
        if not last.same_on_all(step):
            raise Apart
        last.at, last.calls = step, 0
        of_step[step] = batch_of(step)
        return of_step[step]

    # Find out which samples of the step's batch this rank computes, by comparing rows.
    def look(_, inputs):
        last = first.last()
        if last.at is not None and torch.is_grad_enabled():
            rows = (inputs[0][:, None] == of_step[last.at][0]).all(-1).nonzero()[:, 1].tolist()
            got["samples"].setdefault((min(last.shrinks, len(deaths)), last.at), []).extend(rows)

    model[0].register_forward_pre_hook(look)
    try:
        train(first, model, optimizer, batch, STEPS)
        if first.last().failed:
            got["end"] = "left"
    except (*ENDS.values(), _Mistake) as end:
        got["end"], got["said"] = type(end).__name__, f"{end}"
    except Exception as error:
        if failure_of_a_rank(error):
            got["end"] = "failed"
        elif isinstance(error, (WaitTimeout, CommunicationError, MPI.Exception)) and first.next:
            got["end"] = "waited"  # for calls that other ranks make in another order
        else:
            raise
    got["deaths"], got["calls"] = min(first.last().shrinks, len(deaths)), first.calls
    first.leave()
    return {**got, "parameters": flat(model)}
