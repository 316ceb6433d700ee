"""Lesson 09: check that an epoch, resumed with other numbers of ranks, reads each sample exactly once."""

import json

from dtlib.lab.checks.equality import whole_numbers
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l09.judge_input import order_of

# (samples, runs); a run is (ranks, batch size, steps). None runs to the end; 0 saves without a loop.
RUNS = (
    (63, ((2, 5, 2), (2, 5, None))),
    (60, ((2, 5, 2), (3, 4, None))),
    (60, ((3, 4, 2), (1, 6, None))),
    (60, ((2, 5, 2), (3, 4, 2), (1, 6, None))),
    (47, ((3, 4, 1), (4, 3, 1), (2, 5, 2), (3, 2, None))),
    (10, ((1, 4, 1), (4, 2, None))),
    (17, ((2, 5, 2), (3, 4, None))),  # the last step is short
    (20, ((2, 5, 0), (3, 4, None))),  # saved before the first batch
    (20, ((2, 5, 1), (3, 4, 0), (1, 6, None))),
    (30, ((2, 5, 2), (2, 5, None))),  # loaded into an epoch that has already begun
)
BEGUN = len(RUNS) - 1


def observe_resuming(Epoch, comm):
    """Return for each run of each case the batches of each rank, and its state as text."""
    seen = []
    for place, (samples, runs) in enumerate(RUNS):
        state, case = None, []
        for ranks, batch_size, steps in runs:
            got, states = [], []
            for rank in range(ranks):
                epoch = Epoch(order_of(samples), batch_size, rank, ranks)
                # In one case the state is loaded into an epoch that has begun.
                if state is not None and place == BEGUN:
                    next(iter(epoch), None)
                if state is not None:
                    epoch.load_state_dict(json.loads(state))
                batches = iter(epoch) if steps != 0 else iter(())
                taken = []
                while (steps is None or len(taken) < steps) and (batch := next(batches, None)) is not None:
                    taken.append(whole_numbers(batch))
                    if len(taken) > 10 * samples:
                        break
                got.append(taken)
                states.append(_as_text(epoch.state_dict()) if steps is not None else "")
            # All ranks resume from the state of rank 0, because the number of ranks may change.
            state = states[0]
            case.append((got, states))
            if state.startswith("no JSON"):
                break
        seen.append(case)
    return seen


def _as_text(state) -> str:
    try:
        return json.dumps(state, sort_keys=True)
    except TypeError:
        return f"no JSON: {state!r:.60}"


def judge_resuming(observations) -> None:
    """Check that each sample is read once over all runs, in batches of the requested size."""
    for place, ((samples, runs), case) in enumerate(zip(RUNS, observations[0], strict=True)):
        order, seen = order_of(samples), []
        read = sorted(n for got, _ in case for rank in got for batch in rank for n in batch)
        wrong = rows(None)
        wrong("loaded-later", place == BEGUN and read != sorted(order),
              f"each of {samples} samples once, if a state is loaded during an epoch",
              "other samples, but right in a new epoch",
              "Does load_state_dict start at the position that this epoch has already reached?",
              "Set the number of samples, and slice the whole order: self.taken = state[...].")
        for number, ((ranks, batch_size, steps), (got, states)) in enumerate(zip(runs, case, strict=False)):
            run = f"{samples} samples; run {number + 1} of {len(runs)}: {ranks} ranks, batch size {batch_size}"
            _judge_run(run, got, states, batch_size, 10 * samples if steps is None else None)
            before, now = list(seen), [n for rank in got for batch in rank for n in batch]
            seen += now
            _judge_again(run, order, before, now, got, number, runs)
        if lost := [n for n in order if n not in seen]:
            first, last = runs[0][0], runs[-1][0]
            told = f"{len(lost)} never arrived, in {len(runs)} runs, each resumed from the one before: {lost[:5]}"
            everything = "Save how many samples *all* ranks have read, not the batches or samples of one rank."
            wrong("saved-unread", any(steps == 0 for _, _, steps in runs), f"all {samples} samples", told,
                  UNREAD, "Start to count in __init__.")
            if first != last:
                hint = f"{first} ranks saved, and another number resumes. Does the state mean the same for both?"
                wrong("other-ranks", True, f"all {samples} samples", told, hint, everything)
            wrong("lost", True, f"all {samples} samples", told,
                  "Does a short last batch arrive? Does the state count batches that nobody has received yet?",
                  everything)


UNREAD = "A state was saved before the first batch: it must contain the loaded state, or zero samples."


def _judge_run(run, got, states, batch_size, endless) -> None:
    for rank, batches in enumerate(got):
        wrong = rows(rank)
        if odd := [batch for batch in batches if isinstance(batch, str)]:
            wrong("type", True, f"{run}: batches that are lists of numbers", odd[0],
                  "Yield a list of numbers.", "yield step[self.rank :: self.ranks]")
        if large := [batch for batch in batches if len(batch) > batch_size]:
            wrong("batch-size", True, f"{run}: at most {batch_size} samples in a batch", f"{len(large[0])}",
                  "batch_size is the number of samples for one rank. How many does all ranks' step have?",
                  "step[self.rank :: self.ranks] of batch_size * ranks samples.")
        while batches and not batches[-1]:
            wrong("endless", endless and len(batches) > endless, f"{run}: an end", "empty batches, for ever",
                  "When have all samples been read? What ends the loop?", "while self.taken < len(self.order):")
            batches = batches[:-1]
        if small := [len(batch) for batch in batches[:-1] if len(batch) < batch_size]:
            wrong("small-batches", True, f"{run}: {batch_size} samples in each batch but the last",
                  f"{small[0]} in one batch",
                  "In a step one rank reads batch_size samples. How many do all ranks read together?",
                  "A step is the next batch_size * ranks entries: step[self.rank :: self.ranks] belongs to this rank.")
    if states[0].startswith("no JSON"):
        raise Wrong("no-json", None, f"{run}: a state of plain numbers and lists", states[0],
                    "One number is enough.", 'return {"samples": self.taken}')
    if other := [(rank, state) for rank, state in enumerate(states) if state != states[0]]:
        rank, state = other[0]
        raise Wrong("states-differ", rank, f"{run}: the same state on all ranks, after the same number of batches",
                    f"{state:.60}, and on rank 0 {states[0]:.60}",
                    "Only one rank saves. Does its state describe the progress of all ranks?",
                    "With each batch, all ranks together read batch_size * ranks more samples.")


def _judge_again(run, order, before, now, got, number, runs) -> None:
    again = [n for n in now if n in before]
    wrong = rows(None)
    if len(set(now)) < len(now):
        twice = next(n for n in now if now.count(n) > 1)
        wrong("overlap", True, f"{run}: each sample once", f"sample {twice} {now.count(twice)} times in this run",
              "In a step all ranks read the next batch_size * ranks samples. Which of them belong to this rank?",
              "step[self.rank :: self.ranks]")
    if not again:
        return
    first = order.index(again[0])
    told = f"sample {again[0]}, number {first} of the order, had arrived before the state was saved"
    wrong("saved-unread", runs[number - 1][2] == 0, f"{run}: the remaining samples", told, UNREAD,
          "Start to count in __init__.")
    wrong("short-step", len(before) == len(order), f"{run}: nothing, because all samples had been read", told,
          "The last step was short. How many samples does the state count for it?",
          "self.taken += len(step), the samples of all ranks together.")
    wrong("from-the-start", len(again) == len(before), f"{run}: the remaining samples", told,
          "load_state_dict has no effect on the batches. Where does __iter__ start?",
          "self.taken = state[...], and __iter__ begins there.")
    wrong("batch-in-hand", number == 1 and runs[0][0] == runs[1][0], f"{run}: the remaining samples", told,
          "The state was saved while the loop processed a batch. Does the state count this batch?",
          "A generator stops at yield. Count a batch before you yield it, not afterwards.")
    wrong("second-resume", number > 1, f"{run}: the remaining samples", told,
          "The first resume was right, the second was not. Does the state also count the samples before the first?",
          "Continue to count from the loaded number.")
    wrong("other-ranks", True, f"{run}: the remaining samples", told,
          f"{runs[number - 1][0]} ranks saved, and {runs[number][0]} resume. Does the state mean the same for both?",
          "Save how many samples *all* ranks have read, not the batches or samples of one rank.")


EXERCISES = {"resume-build": Exercise("Epoch", observe_resuming, judge_resuming, needs_ranks=False)}
