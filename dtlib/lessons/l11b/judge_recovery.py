"""Lesson 11b: check of recoveries after simulated deaths, by losses and parameters against one process."""

from collections import Counter

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l11b.observe_recovery import DEATHS, MISTAKE, SAMPLES, STEPS, alone, observe


def judge(observations) -> None:
    """Check that all survivors have the parameters of an undisturbed run, in every case of deaths."""
    wrong = rows(None)
    wrong("too-few", not all(observations), "two ranks at least", "one", "Start more: lab.engines(3).")
    right = alone()
    for cases in zip(*observations, strict=True):
        living = {rank: case for rank, case in enumerate(cases) if case["end"] != "Died"}
        name = cases[0]["case"]
        _judge_ends(name, living)
        if name == MISTAKE:
            continue
        plan = DEATHS[name]
        if len(cases) - len(living) < len(plan):
            wrong("no-exchange", True, f"{name}: in each step ranks add up their gradients, by all_reduce on comm",
                  f"comm.all_reduce was not called in step {plan[0].step}, so no rank died in it",
                  "The check lets a rank die inside comm.all_reduce. Which call adds the gradients up here?",
                  "comm.all_reduce(parameter.grad), on the communicator that train got, or that shrunk returned.")
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
                    "steps-redone", rank, f"{name}: training goes on with step {death.step}",
                    f"it goes on with step {min(steps)}, which all ranks had done",
                    "The result is right, and costs steps that were done. Which ranks still have them?",
                    "Survivors have the parameters after the last step: continue from these, from no older copy.")


def _judge_shares(name: str, living: dict) -> None:
    """With right parameters, check that ranks divided the samples instead of repeating them."""
    of_step = sorted({key for case in living.values() for key in case["samples"] if key[0] == case["deaths"]})
    for key in of_step:
        sizes = [len(case["samples"].get(key, [])) for case in living.values()]
        if sum(sizes) > SAMPLES:
            raise Wrong(
                "whole-batch", None, f"{name}: the {SAMPLES} samples of step {key[1]}, each computed on one rank",
                f"ranks compute {', '.join(map(str, sizes))} of them",
                "The result is right, and takes as long as on one rank. Which part of the batch is this rank's?",
                "x[comm.rank :: comm.size], of the communicator that is in use.")


def _judge_ends(name: str, living: dict) -> None:
    for rank, case in living.items():
        wrong = rows(rank)
        wrong("swallowed", name == MISTAKE and case["end"] != "_Mistake",
              "an error of batch_of, which is no death, ends the training", "it was caught",
              "Not every error means that a rank has died.",
              "In the except clause: if not failure_of_a_rank(error): raise")
        wrong("world-comm", case["end"] == "WorldCommUsed", f"{name}: every call on comm and on shrunk(comm)",
              case.get("said"),
              "world.comm counts the dead too: after a death, who answers there? And comm here is another one.",
              "Ask comm.rank and comm.size, call comm.all_reduce, and after a death comm = shrunk(comm).")
        wrong("no-such-root", case["end"] == "NoSuchRoot", f"{name}: a root that lives",
              f"a broadcast with {case.get('said')}",
              "Ranks are renumbered after a death. Which rank exists, however few are left?",
              "root=0, of the communicator that shrunk gave.")
        wrong("one-death-only", case["end"] == "failed" and case["deaths"], f"{name}: training goes on",
              "the second failure ended it here",
              "One death is survived, the next one is not: what surrounds the code that runs after the first?",
              "A loop around try and except: however often a rank dies, the same lines go on.")
        wrong("not-recovered", case["end"] == "failed", f"{name}: training goes on",
              "the failure of the rank that died ended it here",
              "all_reduce raises an error when a rank has died, and so does every call after it. Who catches it?",
              "except Exception as error: if failure_of_a_rank(error), then comm = shrunk(comm), and go on.")
        wrong("endless", case["end"] == "Endless", f"{name}: steps 0 to {STEPS - 1}", "it goes on for ever",
              "Which communicator is used after the death? The old one fails in every call.", "comm = shrunk(comm)")
        wrong("gave-up", case["end"] == "left" and DEATHS[name][case["deaths"]].step < STEPS - 1,
              f"{name}: those who are left train to the end", "it returned, and called no shrunk(comm)",
              "The failure was caught, and then? A caught error repairs nothing.",
              "In the except clause comm = shrunk(comm); a loop around it goes on with the step that failed.")
        wrong("left-early", case["end"] == "left", f"{name}: nobody leaves as long as others may need it",
              "it had all it needed, and left",
              "This rank had the result of the last step. The others had not, and call shrunk, which is for all.",
              "After the last step, still inside of try: comm.barrier().")


def _explain(name: str, living: dict, rank: int) -> None:
    case, what = living[rank], f"{name}: parameters of one process, after steps 0 to {STEPS - 1}"
    if name == "nobody dies":
        _explain_step(living, rank, what)
    wrong = rows(rank, what)
    if len(begun := {len(case["steps"][0]) for case in living.values()}) > 1 and not any(
        case["deaths"] for case in living.values()
    ):
        wrong("other-steps", True, f"ranks did {sorted(begun)} steps", "All ranks do all steps.")
    # The first step of each survivor after the death.
    resumed = {r: min(c["steps"][c["deaths"]], default=STEPS) for r, c in living.items()}
    wrong("from-the-beginning", not any(resumed.values()),
          "it begins with step 0 again, on parameters that had been trained",
          "What is still there after the death, and which steps are in it?", "Go on with the step that failed.")
    if len(set(resumed.values())) > 1:
        late = max(resumed, key=resumed.get)
        raise Wrong("one-step-apart", late, f"{name}: all ranks go on with the same step",
                    f"rank {late} goes on with step {resumed[late]}, others with step {min(resumed.values())}",
                    "Some ranks had the result of the step in which the other died. Who says where they go on?",
                    "Broadcast the step together with the state, from rank 0 of the new communicator.")
    if waited := [r for r, c in living.items() if c["end"] == "waited"]:
        raise _out_of_step(waited[0], name)
    wrong("ranks-differ", len({tuple(round(value, 9) for value in c["parameters"]) for c in living.values()}) > 1,
          "different ones on different ranks",
          "What does a step change besides parameters, and have all ranks the same of it after the death?",
          "Broadcast model.state_dict() and optimizer.state_dict(), from the same rank: momentum is in the latter.")
    for mistake, how, values in (("step-lost", "missing", "skip"), ("step-twice", "in them twice", "again")):
        for step in range(STEPS):
            wrong(mistake, _close(case["parameters"], alone(**{values: step})), f"step {step} is {how}, on all ranks",
                  "Whose parameters do the ranks go on with, and which steps are in them?",
                  "The step belongs to the state: who gives the parameters gives the step too.")
    for step in range(1, STEPS):
        wrong("momentum-lost", _close(case["parameters"], alone(forget=step)),
              f"those of an optimizer that begins anew with step {step}, on all ranks",
              "What does the optimizer keep from step to step, and where is it after the death?",
              "Keep the optimizer, and load rank 0's optimizer.state_dict() into it.")
    _explain_shares(name, living, rank, what)


def _out_of_step(rank: int, name: str) -> Wrong:
    return Wrong(
        "out-of-step", rank, f"{name}: all ranks call the same, in the same order",
        "this rank waited for a call of others, after the death",
        "After the death, which calls does each rank make? Ranks that were one step further make the same ones.",
        "No call of comm, and no shrunk(comm), inside an if that asks for the rank, the step, or what had failed here.",
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
                    f"samples {lost} are on no rank", "Who takes what is left where samples do not divide by ranks?",
                    "x[comm.rank :: comm.size] leaves none out.")
    if twice := sorted(sample for sample, times in seen.items() if times > 1):
        raise Wrong("samples-twice", rank, f"each of the {SAMPLES} samples of a step on one of {len(living)} ranks",
                    f"samples {twice[:5]} are on several",
                    "batch_of gives the batch of all ranks: which part is this rank's?",
                    "x[comm.rank :: comm.size] gives each sample to one rank.")
    # Train in one process with each mistake, and compare the parameters.
    wrong = rows(rank, what)
    for factor, mistake in ((len(living), "mean-of-means"), (1, "sum-of-means")):
        wrong(mistake, _close(living[rank]["parameters"], alone(weights=_of_means(shares, factor))),
              f"those of the {mistake.replace('-', ' ')}: ranks have "
              f"{', '.join(str(len(share)) for share in shares)} samples",
              "Ranks have unequally many samples. How much does each sample count?",
              "Each rank: the sum over its samples, divided by len(x), the whole batch; all_reduce adds.")
    for factor in (1 / len(living), len(living), SAMPLES, SAMPLES / len(living)):
        wrong("scaled", _close(living[rank]["parameters"], alone(weights=(factor / SAMPLES,) * SAMPLES)),
              f"those of gradients {factor:.3g} times as large",
              "Each sample counts 1/len(x) in the mean over the whole batch. Who divides, and how often?",
              "The sum over this rank's samples, / len(x); all_reduce adds, and nothing else divides.")
    wrong("wrong-without-death", True, "others, and each sample was computed once",
          "Nothing has happened yet. Is the sum over ranks the mean over the whole batch, "
          "and is there one step for it?",
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
          "Who computes what the dead rank had?",
          "In every step ask comm.rank and comm.size of the communicator in use, and cut the whole batch again.")
    wrong("other-mean", True, what, "the same on all ranks, but others",
          "Each sample is computed once after the death too. By what are the gradients divided, and is anything of the "
          "failed step still in them, or in the momentum?",
          "Divide by len(x), not by numbers of ranks or of slices from before, and begin the step with zero_grad.")


def _close(got, expected) -> bool:
    return len(got) == len(expected) and all(abs(a - b) < 1e-9 for a, b in zip(got, expected, strict=True))


EXERCISES = {
    "resume-fix": Exercise("train_after_deaths", observe, judge),
    "shrink-build": Exercise("shrink_and_go_on", observe, judge),
}
