"""Lesson 11b: check of recoveries after simulated deaths, by losses and parameters against one process."""

from collections import Counter

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l11b.observe_recovery import DEATHS, MISTAKE, SAMPLES, STEPS, alone, observe


def judge(observations) -> None:
    """Check that all survivors have the parameters of an undisturbed run, in every case of deaths."""
    wrong = rows(None)
    wrong("too-few", not all(observations), "at least two ranks", "one", "Start more ranks: lab.engines(3).")
    right = alone()
    for cases in zip(*observations, strict=True):
        living = {rank: case for rank, case in enumerate(cases) if case["end"] != "Died"}
        name = cases[0]["case"]
        _judge_ends(name, living)
        if name == MISTAKE:
            continue
        plan = DEATHS[name]
        if len(cases) - len(living) < len(plan):
            wrong("no-exchange", True, f"{name}: in each step ranks add their gradients with all_reduce on comm",
                  f"comm.all_reduce was not called in step {plan[0].step}, so no rank died in it",
                  "The check ends a rank inside comm.all_reduce. Which call adds the gradients in your code?",
                  "comm.all_reduce(parameter.grad): the comm of your function, or the result of shrunk.")
        off = [rank for rank, case in living.items() if not _close(case["parameters"], right)]
        if off:
            _explain(name, living, off[0])
        if waited := [rank for rank, case in living.items() if case["end"] == "waited"]:
            raise _out_of_step(waited[0], name)
        _judge_steps(name, living)
        _judge_shares(name, living)


def _judge_steps(name: str, living: dict) -> None:
    """With right parameters, check that training continued instead of starting from the beginning."""
    for rank, case in living.items():
        for death, steps in zip(DEATHS[name], case["steps"][1:], strict=True):
            if steps and min(steps) < death.step:
                raise Wrong(
                    "steps-redone", rank, f"{name}: training continues with step {death.step}",
                    f"it continues with step {min(steps)}, which all ranks had done",
                    "The result is right, but you repeat steps that were done. Which ranks still have their results?",
                    "Survivors have the parameters after the last step: continue from these, not from an older copy.")


def _judge_shares(name: str, living: dict) -> None:
    """With right parameters, check that ranks divided the samples instead of repeating them."""
    of_step = sorted({key for case in living.values() for key in case["samples"] if key[0] == case["deaths"]})
    for key in of_step:
        sizes = [len(case["samples"].get(key, [])) for case in living.values()]
        if sum(sizes) > SAMPLES:
            raise Wrong(
                "whole-batch", None, f"{name}: the {SAMPLES} samples of step {key[1]}, each computed on one rank",
                f"ranks compute {', '.join(map(str, sizes))} of them",
                "The result is right, but takes as long as on one rank. Which part of the batch belongs to this rank?",
                "x[comm.rank :: comm.size], with the communicator that you use now.")


def _judge_ends(name: str, living: dict) -> None:
    for rank, case in living.items():
        wrong = rows(rank)
        wrong("swallowed", name == MISTAKE and case["end"] != "_Mistake",
              "an error of batch_of, which is not the end of a rank, ends the training", "your code caught it",
              "Not every error means that a rank has ended. Which errors do you catch?",
              "In the except clause: if not failure_of_a_rank(error): raise")
        wrong("world-comm", case["end"] == "WorldCommUsed",
              f"{name}: every call on comm, and on the result of shrunk(comm)", case.get("said"),
              "world.comm contains ranks that have ended. Which communicator contains only the others?",
              "Use comm.rank, comm.size and comm.all_reduce, and after a failure comm = shrunk(comm).")
        wrong("no-such-root", case["end"] == "NoSuchRoot", f"{name}: a root that still runs",
              f"a broadcast with {case.get('said')}",
              "Ranks get new numbers after a failure. Which number exists in every communicator?",
              "root=0, of the result of shrunk.")
        wrong("one-death-only", case["end"] == "failed" and case["deaths"], f"{name}: training continues",
              "the second failure ended it here",
              "Training survives one failure, but not the second. Does the later code run inside a try?",
              "Write a loop around try and except, so that the same lines run after every failure.")
        wrong("not-recovered", case["end"] == "failed", f"{name}: training continues",
              "the failure of another rank ended it here",
              "all_reduce and all later calls raise an error after a rank has ended. Where do you catch it?",
              "except Exception as error: if failure_of_a_rank(error), then comm = shrunk(comm), and continue.")
        wrong("endless", case["end"] == "Endless", f"{name}: steps 0 to {STEPS - 1}", "it continues without an end",
              "Which communicator do you use now? The old one raises in every call.",
              "comm = shrunk(comm)")
        wrong("gave-up", case["end"] == "left" and DEATHS[name][case["deaths"]].step < STEPS - 1,
              f"{name}: the remaining ranks train to the end", "it returned, and did not call shrunk(comm)",
              "You caught the failure. How do you get a communicator of the ranks that still run?",
              "In the except clause comm = shrunk(comm); a loop around it repeats the step that failed.")
        wrong("left-early", case["end"] == "left", f"{name}: no rank leaves while others may need it",
              "it had all results that it needed, and left",
              "This rank had the result of the last step. Others had not, and call shrunk, which needs all ranks.",
              "After the last step, still inside the try: comm.barrier().")


def _explain(name: str, living: dict, rank: int) -> None:
    case, what = living[rank], f"{name}: parameters of one process, after steps 0 to {STEPS - 1}"
    if name == "nobody dies":
        _explain_step(living, rank, what)
    wrong = rows(rank, what)
    if len(begun := {len(case["steps"][0]) for case in living.values()}) > 1 and not any(
        case["deaths"] for case in living.values()
    ):
        wrong("other-steps", True, f"ranks did {sorted(begun)} steps", "All ranks must do all steps.")
    # The first step of each survivor after the death.
    resumed = {r: min(c["steps"][c["deaths"]], default=STEPS) for r, c in living.items()}
    wrong("from-the-beginning", not any(resumed.values()), "it starts again with step 0, on trained parameters",
          "What still exists after the failure, and which steps does it include?",
          "Continue with the step that failed.")
    if len(set(resumed.values())) > 1:
        late = max(resumed, key=resumed.get)
        raise Wrong("one-step-apart", late, f"{name}: all ranks continue with the same step",
                    f"rank {late} continues with step {resumed[late]}, others with step {min(resumed.values())}",
                    "Some ranks had finished the step in which the other rank died. How do ranks agree on a step?",
                    "Broadcast the step together with the state, from rank 0 of the new communicator.")
    if waited := [r for r, c in living.items() if c["end"] == "waited"]:
        raise _out_of_step(waited[0], name)
    wrong("ranks-differ", len({tuple(round(value, 9) for value in c["parameters"]) for c in living.values()}) > 1,
          "different parameters on different ranks",
          "What does a step change besides parameters? Is it equal on all ranks after the failure?",
          "Broadcast model.state_dict() and optimizer.state_dict() from the same rank: the latter has the momentum.")
    for mistake, how, values in (("step-lost", "missing", "skip"), ("step-twice", "done twice", "again")):
        for step in range(STEPS):
            wrong(mistake, _close(case["parameters"], alone(**{values: step})), f"step {step} is {how}, on all ranks",
                  "With which rank's parameters do the ranks continue, and which steps do they include?",
                  "The step belongs to the state: broadcast both from the same rank.")
    for step in range(1, STEPS):
        wrong("momentum-lost", _close(case["parameters"], alone(forget=step)),
              f"the result of an optimizer that is new in step {step}, on all ranks",
              "Which state does the optimizer keep between steps, and where is it after the failure?",
              "Keep the optimizer, and load rank 0's optimizer.state_dict() into it.")
    _explain_shares(name, living, rank, what)


def _out_of_step(rank: int, name: str) -> Wrong:
    return Wrong(
        "out-of-step", rank, f"{name}: the same calls on all ranks, in the same order",
        "this rank waited for a call of other ranks, after the failure",
        "Which calls does each rank make after the failure? Ranks that were one step ahead must make the same.",
        "Do not call comm or shrunk(comm) inside an if that depends on the rank, the step, or the local error.",
    )


def _shares(living: dict, deaths: int, step: int) -> list:
    """Return the samples of a step that each rank has computed, after this number of deaths."""
    return [case["samples"].get((deaths, step), []) for case in living.values()]


def _explain_step(living: dict, rank: int, what: str) -> None:
    """Recognise a mistake without any death, from the samples and gradients of the first step."""
    shares = _shares(living, 0, 0)
    seen = Counter(sample for share in shares for sample in share)
    if lost := sorted(set(range(SAMPLES)) - set(seen)):
        raise Wrong("rest-dropped", rank, f"each of the {SAMPLES} samples of a step on one of {len(living)} ranks",
                    f"samples {lost} are on no rank",
                    "If the samples do not divide by the ranks, which rank gets the rest?",
                    "x[comm.rank :: comm.size] includes all samples.")
    if twice := sorted(sample for sample, times in seen.items() if times > 1):
        raise Wrong("samples-twice", rank, f"each of the {SAMPLES} samples of a step on one of {len(living)} ranks",
                    f"samples {twice[:5]} are on several ranks",
                    "batch_of returns the batch of all ranks. Which part belongs to this rank?",
                    "x[comm.rank :: comm.size] gives each sample to one rank.")
    # Train in one process with each mistake, and compare the parameters.
    wrong = rows(rank, what)
    for factor, mistake in ((len(living), "mean-of-means"), (1, "sum-of-means")):
        wrong(mistake, _close(living[rank]["parameters"], alone(weights=_of_means(shares, factor))),
              f"the result of the {mistake.replace('-', ' ')}: ranks have "
              f"{', '.join(str(len(share)) for share in shares)} samples",
              "Ranks have different numbers of samples. What is the weight of each sample?",
              "On each rank: the sum over its samples, divided by len(x), the whole batch; all_reduce adds.")
    for factor in (1 / len(living), len(living), SAMPLES, SAMPLES / len(living)):
        wrong("scaled", _close(living[rank]["parameters"], alone(weights=(factor / SAMPLES,) * SAMPLES)),
              f"the result of gradients {factor:.3g} times as large",
              "In the mean over the whole batch, each sample has weight 1/len(x). What divides, and how often?",
              "The sum over this rank's samples, / len(x); all_reduce adds. Do not divide again.")
    wrong("wrong-without-death", True, "other parameters, and each sample was computed once",
          "No rank has ended yet. Is your sum over ranks the mean over the whole batch? Is there one step for it?",
          "zero_grad, the sum over its samples / len(x), backward, all_reduce of each gradient, optimizer.step().")


def _of_means(shares, factor: int) -> tuple:
    weights = {sample: 1 / len(share) / factor for share in shares for sample in share}
    return tuple(weights[sample] for sample in range(SAMPLES))


def _explain_shares(name: str, living: dict, rank: int, what: str) -> None:
    """Recognise a mistake from the samples after the death, if wrong parameters are equal on all ranks."""
    deaths = living[rank]["deaths"]
    step = min(living[rank]["steps"][deaths], default=0)
    seen = Counter(sample for share in _shares(living, deaths, step) for sample in share)
    lost = sorted(set(range(SAMPLES)) - set(seen))
    twice = sorted(sample for sample, times in seen.items() if times > 1)
    got = f"samples {lost} are on no rank" if lost else f"samples {twice} are on several ranks" if twice else ""
    wrong = rows(rank)
    wrong("other-batch", got, f"{name}: the whole batch in step {step} too, on those who are left", got,
          "Which rank computes the samples of the rank that ended?",
          "In every step use comm.rank and comm.size of the current communicator, and slice the whole batch again.")
    wrong("other-mean", True, what, "equal on all ranks, but wrong",
          "Each sample is computed once after the failure too. By what do you divide the gradients? Does anything of "
          "the failed step remain in them, or in the momentum?",
          "Divide by len(x), not by old numbers of ranks or parts, and start the step with zero_grad.")


def _close(got, expected) -> bool:
    return len(got) == len(expected) and all(abs(a - b) < 1e-9 for a, b in zip(got, expected, strict=True))


EXERCISES = {
    "resume-fix": Exercise("train_after_deaths", observe, judge),
    "shrink-build": Exercise("shrink_and_go_on", observe, judge),
}
