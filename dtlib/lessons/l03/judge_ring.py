"""Lesson 03: check of a ring all-reduce by its values and by the messages of each rank."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l03.observe_ring import BASE, input_of, lengths, observe_ring, unit_of

POINT_TO_POINT = ("send", "recv")
RESIZED = ("The tensor has another length now.", "Change values in place (+=, copy_); no resize_, no set_, no .data =.")


def judge_ring(observations) -> None:
    """Check that every rank has the sum in its own tensor, and sent no more bytes than a ring needs."""
    # Values of all lengths first: advice about waits and cost is of no use for a wrong result.
    _judge_operations(observations)
    for cases in _by_length(observations):
        _judge_errors(cases)
        _judge_values(cases)
    for cases in _by_length(observations):
        _judge_waits(cases)
    for cases in _by_length(observations):
        _judge_cost(cases)


def _by_length(observations):
    """Yield for each length the case of every rank that got this far."""
    for number in range(max(len(seen) for seen in observations)):
        yield {rank: seen[number] for rank, seen in enumerate(observations) if number < len(seen)}


def _judge_operations(observations) -> None:
    for rank, seen in enumerate(observations):
        others = {name for case in seen for name, *_ in case["operations"]} - set(POINT_TO_POINT)
        if others:
            raise Wrong("collective-inside", rank, "send and recv alone", f"{', '.join(sorted(others))}",
                        "This exercise builds the collective itself: use nothing but comm.send and comm.recv.",
                        "Cut the tensor into comm.size chunks and pass chunks on to the right neighbour.")


def _judge_errors(cases) -> None:
    failed = [(case["waited"], rank, case) for rank, case in cases.items() if "error" in case]
    if not failed:
        return
    waited, rank, case = min(failed, key=lambda entry: entry[:2])  # errors are causes, timeouts are effects
    length, got = case["length"], f"{case['error']} (with {case['length']} elements)"
    wrong = rows(rank)
    wrong("other-type", case["dtype"] == "float32", "no error with a tensor of float32",
          f"{got}, and with float64 it was right",
          "A tensor may have another type: where does the code take one for granted?",
          "torch.empty_like(chunk) has the type of the chunk.")
    wrong("other-type", "more arrived" in got and f") {case['dtype']}: more" not in got,
          f"a tensor of {case['dtype']} to receive into", got,
          "What arrives has the type of the tensor that was sent: which type has the one it is received into?",
          "torch.empty_like(chunk) has the type of the chunk.")
    wrong("other-chunk", "more arrived" in got, "messages of the chunk that the receiver has room for", got,
          "Two ranks mean different chunks: which one does the left neighbour send in this step? An empty one, too?",
          "In every step of both halves each rank sends to the right and receives from the left: one chunk each.")
    wrong("remainder", length not in (lengths(len(cases))[0], lengths(len(cases))[-1]) and not waited,
          f"no error with {length} elements on {len(cases)} ranks", got,
          "Lengths that divide by the number of ranks work: cut the others into unequal chunks.",
          "Chunk p goes from length * p // comm.size to length * (p + 1) // comm.size; chunks may be empty.")
    wrong("long-messages", waited and length == lengths(len(cases))[-1],
          f"no hang with {length:,} elements on {len(cases)} ranks", got,
          "Short messages leave at once, long ones wait until somebody receives them. Does anybody, while all send?",
          "Start the send with async_op=True, receive, then wait for the send: handle.wait().")
    wrong("waited", waited, "a send for every receive", got,
          "Does every rank that receives have a left neighbour that sends, in the same step and with the same tag?",
          "In a step all ranks send and receive: start the send with async_op=True, receive, then wait for the send.",
          "right = (comm.rank + 1) % comm.size, left = (comm.rank - 1) % comm.size: send right, receive from left.")
    wrong("raised", True, "no error", got, *case["hints"])


def _judge_values(cases) -> None:
    import torch

    size, length, dtype = len(cases), cases[0]["length"], cases[0]["dtype"]
    expected = _expected(size, length, dtype)
    off = {rank: case for rank, case in cases.items() if case["values"] != expected}
    if not off:
        return
    first = lengths(size)[0]
    rank = min(off)
    if len(off[rank]["values"]) != length:
        got = f"{len(off[rank]['values'])}"
        raise Wrong("other-values", rank, f"a tensor of {length} elements", got, *RESIZED)
    place = next(i for i in range(length) if off[rank]["values"][i] != expected[i])
    value = off[rank]["values"][place]
    where = f"element {place} of {length}"
    what = f"in {where}: the values of each rank once"
    times = _times(value, place, size, dtype)
    got = f"{value:g}" if times is None else _in_words(times)
    wrong = rows(rank, what)
    if all(case["values"] == input_of(r, length, size, dtype).tolist() for r, case in cases.items()):
        if all(case["returned"] == expected for case in cases.values()):
            raise Wrong("not-in-place", rank, "the sum in the tensor itself",
                        "a new tensor; the one passed is as before",
                        "Like comm.all_reduce it works in place: the caller looks at the tensor that it passed.",
                        "Work on views: chunks = torch.tensor_split(tensor, comm.size) share the tensor's memory.")
        wrong("nothing-done", True, "the tensor is as before",
              "Something may have been added up. But does it find its way into the tensor that was passed?",
              "Cut the tensor into views, such as torch.tensor_split(tensor, comm.size), and add to them in place: +=.")
    wrong("remainder", length != first, got,
          f"{first} elements come out right, {length} do not: how long is each chunk then?",
          "Chunk p goes from length * p // comm.size to length * (p + 1) // comm.size; chunks may be empty.")
    if 0 not in off and len(off) == size - 1 and size > 1:
        raise Wrong("only-root", rank, "the sum on every rank", f"rank 0 alone has it; here {where} has {got}",
                    "How do the other ranks get the result?",
                    "The second half of a ring: N-1 more steps, in which complete chunks are passed on.")
    if all(abs(a - b) <= 1e-2 * b for case in cases.values() for a, b in zip(case["values"], expected, strict=True)):
        raise Wrong("rounded", rank, f"{what}, in {dtype} as the tensor is", f"{got}, nearly the sum: it was rounded",
                    "In which type do chunks travel, and in which are they added?",
                    "torch.empty_like(chunk) has the type of the chunk.")
    wrong("divided", all(value * size == right for case in cases.values()
                         for value, right in zip(case["values"], expected, strict=True)),
          f"1/{size} of it: a mean over ranks", "The sum is asked for: who divides?",
          "Add what is received, and leave it at that.")
    # Compare with other reductions over ranks than the sum.
    columns = torch.stack([input_of(r, length, size, dtype).double() for r in range(size)])
    everywhere = torch.tensor([case["values"] for case in cases.values()], dtype=torch.float64)
    for op in ("amax", "amin", "prod"):
        wrong("other-op", torch.allclose(everywhere, getattr(columns, op)(0).expand_as(everywhere)),
              f"the {op.strip('a')} over ranks, complete on all of them",
              "The way round the ring is right. What becomes of a chunk that arrives in the first half?",
              "Chunks are added: incoming += received.")
    sent = [sum(name == "send" for name, *_ in case["operations"]) for case in cases.values()]
    # Each element's sum, read as digits in base BASE, says how often each rank's values are in it.
    everything = [_times(case["values"][i], i, size, dtype) for case in cases.values() for i in range(length)]
    wrong("other-values", None in everything, got,
          "This is no sum of the ranks' values: does a receive write over what is still to be added, or sent?",
          "Receive into a separate tensor, then add it to the chunk.")
    wrong("written-over", any(max(times) > 1 and 0 in times for times in everything), got,
          "The first half writes over what it should add to: where is a chunk received?",
          "Receive into a new tensor, torch.empty_like(chunk), and add that: chunk += received.")
    wrong("counted-twice", any(count > 1 for times in everything for count in times), got,
          "A value is added more than once: in the second half chunks are complete, and received ones take the "
          "place of what is there.", "Add in the first N-1 steps alone; in the other N-1 copy.")
    wrong("one-rank-each", all(sum(times) == 1 for times in everything), f"{got}, and nowhere those of two ranks",
          "Is the sum made in the tensor itself, and is the complete chunk passed on, or is it written over?",
          "incoming += received adds in the view, incoming = incoming + received makes a new tensor. In the second "
          "half the first chunk to be sent is the one that was completed last.")
    complete = sum(times == (1,) * size for times in everything)
    wrong("half-a-ring", complete == length and set(sent) == {size - 1},
          f"{got}; each rank has one chunk complete, after {size - 1} messages",
          "The first half of the ring is right. How do the others get the chunk that a rank has complete?",
          "N-1 steps more, in which complete chunks are passed on and received straight into their place.")
    by_rank = [list(zip(*everything[length * r : length * (r + 1)], strict=True)) for r in range(size)]
    deaf = [(r, other) for r in range(size) for other in range(size) if not any(by_rank[r][other])]
    if deaf:
        wrong("never-heard", True, got, "Rank {} has nothing of rank {}: who sends to whom?".format(*deaf[0]),
              "In a ring of N ranks a value reaches the last one after N - 1 steps.")
    wrong("incomplete", True, f"{got}; {complete} of {size * length} elements of all ranks are complete",
          "Which chunk does a rank have complete after N-1 steps? That is the one it must pass on first, and then, in "
          "each step, the one that has just arrived.",
          "Step s of the first half: send chunk (rank - s - 1) % N, receive chunk (rank - s - 2) % N and add. "
          "Step s of the second: send chunk (rank - s) % N, receive chunk (rank - s - 1) % N.")


def _expected(size, length, dtype) -> list:
    whole = unit_of(size, dtype) * sum(BASE**rank for rank in range(size))
    return [float(whole * (1 + i % 3)) for i in range(length)]


def _times(value, place, size, dtype):
    """Return how often each rank's values are in an element, in rank order; None if it is no such sum."""
    times, rest = divmod(value, unit_of(size, dtype) * (1 + place % 3))
    if rest or not 0 < times < BASE**size:
        return None
    return tuple(int(times) // BASE**rank % BASE for rank in range(size))


def _in_words(times) -> str:
    said = [f"rank {rank} {'once' if n == 1 else f'{n} times'}" for rank, n in enumerate(times) if n]
    return "the values of " + ", ".join(said)


def _judge_waits(cases) -> None:
    for rank, case in cases.items():
        open_, started = case["sends"]
        if open_:
            raise Wrong(
                "not-waited", rank, "a wait() for each send that is started with async_op=True",
                f"{open_} of {started} sends that nobody waits for, with {case['length']} elements",
                "The values are right, by luck: who says when a tensor that is being sent may be changed again?",
                "sending = comm.send(..., async_op=True); receive; then sending.wait(), before the next step.")


def _judge_cost(cases) -> None:
    """Check that ranks send at most the bytes, and about the number of messages, of a ring."""
    size, length = len(cases), cases[0]["length"]
    if size == 1 or length == 0:
        return
    most = 2 * (size - 1) * -(-length // size) * cases[0]["itemsize"]
    sums = {rank: _sent(case) for rank, case in cases.items()}
    if not sum(messages for messages, _ in sums.values()):
        raise Wrong("no-messages", 0, "messages by comm.send", "the sum without a message that the check can see",
                    "The check counts what comm sends, of this comm and no other way to other ranks.",
                    "Use comm.send and comm.recv of the comm that is passed to your function.")
    rank = max(sums, key=lambda rank: sums[rank][1])
    wrong = rows(rank)
    wrong("wider-type", sums[rank][1] > most and cases[0]["dtype"] == "float32",
          f"at most {most:,} bytes from each rank: 4 for each number of float32",
          f"{sums[rank][1]:,} bytes, and with float64 it was right",
          "In which type do chunks travel here?", "torch.empty_like(chunk) has the type of the chunk; no .double().")
    wrong("bytes", sums[rank][1] > most, f"at most {most:,} bytes from each rank, for {length} elements",
          f"{sums[rank][1]:,} bytes in {sums[rank][0]} messages",
          "The values are right, but this rank sends too much. Are they whole arrays, or more steps than needed?",
          "Each step sends one chunk, a comm.size-th of the tensor: 2 (N-1) steps, 2 (N-1)/N of the tensor.")
    if length != lengths(size)[0]:
        return  # empty chunks need no message
    few = min(sums, key=lambda rank: sums[rank][0])
    if sums[few][0] < 2 * (size - 1):
        raise Wrong("messages", few, f"{2 * (size - 1)} messages from each rank, on {size} ranks", f"{sums[few][0]}",
                    "The values are right, but it is no ring: each rank sends in each of 2 (N-1) steps.",
                    "Cut the tensor into comm.size chunks; pass on one chunk a step.")
    many = max(sums, key=lambda rank: sums[rank][0])
    if sums[many][0] > 8 * (size - 1):
        raise Wrong("messages", many, f"about {2 * (size - 1)} messages from each rank, on {size} ranks",
                    f"{sums[many][0]}", "Every message costs latency: send a chunk in one piece.",
                    "comm.send(chunk, right, async_op=True): the whole chunk, in one call, in each of 2 (N-1) steps.")
    for rank, case in cases.items():
        to = {dest for name, dest, *_ in case["operations"] if name == "send"}
        if len(to) > 2:
            raise Wrong(
                "no-ring", rank, "messages to neighbours alone", f"messages to the ranks {sorted(to)}",
                "The values are right, and no more bytes travel than in a ring. To how many ranks does one rank send?",
                "In a ring a rank sends to its right neighbour, (rank + 1) % N, and to nobody else.")


def _sent(case) -> tuple[int, int]:
    return sum(messages for *_, messages, _ in case["operations"]), sum(count for *_, count in case["operations"])


EXERCISES = {
    "ring-fix": Exercise("ring_all_reduce", observe_ring, judge_ring, any_size=True),
    "ring-build": Exercise("my_all_reduce", observe_ring, judge_ring, any_size=True),
}
