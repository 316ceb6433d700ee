"""Lesson 11b: recoveries after a death that is simulated, judged by losses and parameters against one process."""

from dtlib.errors import CommunicationError, WaitTimeout
from dtlib.lab.checks.exercise import Exercise, Wrong
from dtlib.lab.lessons.l11b.simulated_death import Apart, Died, Dying, Endless
from dtlib.recovery.shrink import failure_of_a_rank

STEPS = 6
SAMPLES = 12
MISTAKE = "batch_of raises an error"
# Who dies in which step, and who of the others still gets the result of that step's first all_reduce.
DEATHS = {
    "nobody dies": (None, 0, ()),
    "the last rank dies in step 2": (-1, 2, ()),
    "rank 0 dies in step 3": (0, 3, ()),
    "the last rank dies in step 2, of which rank 1 has the result": (-1, 2, (1,)),
    "the last rank dies in step 3, of which rank 0 has the result": (-1, 3, (0,)),
    "rank 0 dies in the last step, of which rank 1 has the result": (0, STEPS - 1, (1,)),
}


def make_model(seed: int = 0):
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batch_of(step: int):
    """The batch of all ranks together in a step."""
    import torch

    chance = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 3, generator=chance, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def alone(skip=None, again=None) -> tuple[list, list]:
    """Losses and parameters of one process; without step ``skip``, or with step ``again`` done twice."""
    import torch

    model, optimizer = make_model()
    losses, steps = [], [step for step in range(STEPS) for _ in range(1 + (step == again)) if step != skip]
    for step in steps:
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, flat(model)


def flat(model) -> list:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def observe(train, comm):
    """For each of ``DEATHS`` that this number of ranks allows, and for a mistake: what became of this rank."""
    fits = {name: plan for name, plan in DEATHS.items() if comm.size > 1 + bool(plan[2])}
    seen = []
    for name, plan in fits.items():
        seen.append(_train(train, comm, name, *plan))
        if any(comm.all_gather_object(seen[-1]["end"] == "Apart")):
            return seen  # before they wait for one another
    return [*seen, _train(train, comm, MISTAKE)] if fits else []


class _Mistake(Exception):
    """Not a rank's failure: nothing that an answer should catch."""


def _train(train, comm, case: str, rank=None, death=0, ahead=()) -> dict:
    """``before`` and ``after`` are the steps that were begun before and after the ranks shrank."""
    from mpi4py import MPI

    model, optimizer = make_model()
    part = comm.split(0)
    part.time_limit = comm.time_limit / 2  # so that who waits here in vain comes to the next case in time
    dying = Dying(part, None if rank is None else rank % comm.size, death, ahead)
    came = {"case": case, "before": [], "after": [], "end": "returned"}

    def batch(step):
        if step not in range(STEPS):
            raise IndexError(f"batch_of({step!r}): steps are 0 to {STEPS - 1}")
        steps = came["after" if vars(dying).get("shrunk") else "before"]
        if case == MISTAKE and step == 2 and len(steps) == 2:
            steps.append(step)
            raise _Mistake
        if len(steps) > 3 * STEPS:
            raise Endless
        steps.append(step)
        rest = vars(dying).get("rest")
        if rest is not None and len(set(rest.all_gather_object(step))) > 1:
            raise Apart
        dying.at = step
        return batch_of(step)

    try:
        train(dying, model, optimizer, batch, STEPS)
        if dying._failed and not vars(dying).get("shrunk"):
            came["end"] = "left"
    except (Apart, Died, Endless, _Mistake) as end:
        came["end"] = type(end).__name__
    except Exception as error:
        if failure_of_a_rank(error):
            came["end"] = "failed"
        elif isinstance(error, (WaitTimeout, CommunicationError, MPI.Exception)) and vars(dying).get("shrunk"):
            came["end"] = "waited"  # for calls that others make in another order
        else:
            raise
    dying.leave()
    return {**came, "parameters": flat(model)}


def judge(observations) -> None:
    """Who lives has the parameters of a run that nothing happened to, whoever died and however far the others were."""
    if not all(observations):
        raise Wrong("too-few", None, "two ranks at least", "one", "Start more: lab.engines(3).")
    right = alone()[1]
    for cases in zip(*observations, strict=True):
        living = {rank: case for rank, case in enumerate(cases) if case["end"] != "Died"}
        _judge_ends(cases[0]["case"], living)
        if cases[0]["case"] == MISTAKE:
            continue
        wrong = [rank for rank, case in living.items() if not _close(case["parameters"], right)]
        if wrong:
            _explain(cases[0]["case"], living, wrong[0])


def _judge_ends(name: str, living: dict) -> None:
    for rank, case in living.items():
        if name == MISTAKE and case["end"] != "_Mistake":
            raise Wrong(
                "swallowed", rank, "an error of batch_of, which is no death, ends the training", "it was caught",
                "Not every error means that a rank has died.",
                "In the except clause: if not failure_of_a_rank(error): raise",
            )  # fmt: skip
        if case["end"] == "failed":
            raise Wrong(
                "not-recovered", rank, f"{name}: training goes on", "the failure of the rank that died ended it here",
                "all_reduce raises an error when a rank has died, and so does every call after it. Who catches it?",
                "except Exception as error: if failure_of_a_rank(error), then comm = shrunk(comm), and go on.",
            )  # fmt: skip
        if case["end"] == "Endless":
            raise Wrong(
                "endless", rank, f"{name}: steps 0 to {STEPS - 1}", "it goes on for ever",
                "Which communicator is used after the death? The old one fails in every call.", "comm = shrunk(comm)",
            )  # fmt: skip
        if case["end"] == "left":
            raise Wrong(
                "left-early", rank, f"{name}: nobody leaves as long as others may need it",
                "it had all it needed, and left",
                "This rank had the result of the last step. The others had not, and call shrunk, which is for all.",
                "After the last step, still inside of try: comm.barrier().",
            )  # fmt: skip


def _explain(name: str, living: dict, rank: int) -> None:
    case, what = living[rank], f"{name}: parameters of one process, after steps 0 to {STEPS - 1}"
    if name == "nobody dies":
        raise Wrong(
            "wrong-without-death", rank, what, "others",
            "Nothing has happened yet. Is the sum over ranks the mean over the whole batch?",
            "Each rank: the mean over its slice, times len(slice) / len(batch); then all_reduce, which adds.",
        )  # fmt: skip
    resumed = {r: min(c["after"], default=STEPS) for r, c in living.items()}
    if not any(resumed.values()):
        raise Wrong(
            "from-the-beginning", rank, what, "it begins with step 0 again, on parameters that had been trained",
            "What is still there after the death, and which steps are in it?", "Go on with the step that failed.",
        )  # fmt: skip
    if len(set(resumed.values())) > 1:
        late = max(resumed, key=resumed.get)
        raise Wrong(
            "one-step-apart", late, f"{name}: all ranks go on with the same step",
            f"rank {late} goes on with step {resumed[late]}, others with step {min(resumed.values())}",
            "Some ranks had the result of the step in which the other died. Who says where they go on?",
            "Broadcast the step together with the state, from rank 0 of the new communicator.",
        )  # fmt: skip
    if waited := [r for r, c in living.items() if c["end"] == "waited"]:
        raise Wrong(
            "out-of-step", waited[0], f"{name}: all ranks call the same, in the same order",
            "they do not, after the death",
            "After the death, which calls does each rank make? Ranks that were one step further make the same ones.",
        )  # fmt: skip
    if len({tuple(round(value, 9) for value in c["parameters"]) for c in living.values()}) > 1:
        raise Wrong(
            "ranks-differ", rank, what, "different ones on different ranks",
            "What does a step change besides parameters, and have all ranks the same of it after the death?",
            "Broadcast model.state_dict() and optimizer.state_dict(), from the same rank: momentum is in the latter.",
        )  # fmt: skip
    for mistake, how, values in (("step-lost", "missing", "skip"), ("step-twice", "in them twice", "again")):
        for step in range(STEPS):
            if _close(case["parameters"], alone(**{values: step})[1]):
                raise Wrong(
                    mistake, rank, what, f"step {step} is {how}, on all ranks",
                    "Whose parameters do the ranks go on with, and which steps are in them?",
                    "The step belongs to the state: who gives the parameters gives the step too.",
                )  # fmt: skip
    raise Wrong(
        "other-batch", rank, what, "the same on all ranks, but others",
        "Which samples does nobody see after the death? And who divides by what?",
        "In every step ask comm.rank and comm.size of the communicator that is in use, and cut the whole batch anew.",
    )  # fmt: skip


def _close(came, expected) -> bool:
    return len(came) == len(expected) and all(abs(a - b) < 1e-9 for a, b in zip(came, expected, strict=True))


EXERCISES = {
    "resume-mend": Exercise("train_after_deaths", observe, judge),
    "shrink-build": Exercise("shrink_and_go_on", observe, judge),
}
