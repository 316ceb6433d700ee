"""Lesson 03: check of a ring all-reduce by its values and by the messages of each rank."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l03.observe_ring import BASE, input_of, lengths, observe_ring, unit_of

POINT_TO_POINT = ("send", "recv")
RESIZED = ("The tensor now has another length.", "Change values in place (+=, copy_); no resize_, no set_, no .data =.")


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
            raise Wrong("collective-inside", rank, "only send and recv", f"{', '.join(sorted(others))}",
                        "You build the collective yourself. Which calls are not comm.send or comm.recv?",
                        "Divide the tensor into comm.size chunks and send chunks to the right neighbour.")


def _judge_errors(cases) -> None:
    failed = [(case["waited"], rank, case) for rank, case in cases.items() if "error" in case]
    if not failed:
        return
    waited, rank, case = min(failed, key=lambda entry: entry[:2])  # errors are causes, timeouts are effects
    length, got = case["length"], f"{case['error']} (with {case['length']} elements)"
    wrong = rows(rank)
    wrong("other-type", case["dtype"] == "float32", "no error with a tensor of float32",
          f"{got}, and with float64 it was right", "The tensor may have another type. Which line assumes one type?",
          "torch.empty_like(chunk) has the type of the chunk.")
    wrong("other-type", "more arrived" in got and f") {case['dtype']}: " not in got,
          f"a tensor of {case['dtype']} to receive into", got,
          "A message has the type of the tensor that was sent. Which type has the tensor that receives it?",
          "torch.empty_like(chunk) has the type of the chunk.")
    wrong("other-chunk", "more arrived" in got, "messages of the size of the receiving chunk", got,
          "Two ranks expect different chunks. Which chunk does the left neighbour send in this step?",
          "In every step of both halves each rank sends one chunk to the right and receives one from the left.")
    wrong("truncated", "TRUNCATE" in got, "messages of the type and length of the array that receives them", got,
          "MPI has received more bytes than the array can hold. Do type and length of both sides agree?",
          "np.empty_like(chunk) has the type and the length of the chunk.")
    wrong("remainder", length not in (lengths(len(cases))[0], lengths(len(cases))[-1]) and not waited,
          f"no error with {length} elements on {len(cases)} ranks", got,
          "Lengths that divide by the number of ranks work. Cut other lengths into unequal chunks.",
          "Chunk p contains length * p // comm.size up to length * (p + 1) // comm.size; chunks may be empty.")
    wrong("long-messages", waited and length == lengths(len(cases))[-1],
          f"no hang with {length:,} elements on {len(cases)} ranks", got,
          "A send of a long message waits for a receive. Which rank receives while all ranks send?",
          "Start the send with async_op=True, receive, then wait for the send: handle.wait().")
    wrong("waited", waited, "a send for every receive", got,
          "Does each receive have a matching send: from the left neighbour, in the same step, with the same tag?",
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
            raise Wrong("not-in-place", rank, "the sum in the tensor that was passed",
                        "a new tensor; the passed tensor has not changed",
                        "The caller reads the result from the passed tensor. Does your code write into it?",
                        "Work on views: chunks = torch.tensor_split(tensor, comm.size) share the tensor's memory.")
        wrong("nothing-done", True, "the tensor has not changed",
              "Your code may compute a sum. But does it write the sum into the tensor that was passed?",
              "Divide the tensor into views, such as torch.tensor_split(tensor, comm.size), and add in place: +=.")
    wrong("remainder", length != first, got,
          f"The result is right for {first} elements and wrong for {length}. How long must each chunk be?",
          "Chunk p contains length * p // comm.size up to length * (p + 1) // comm.size; chunks may be empty.")
    if 0 not in off and len(off) == size - 1 and size > 1:
        raise Wrong("only-root", rank, "the sum on every rank", f"only rank 0 has it; here {where} has {got}",
                    "How do the other ranks receive the result?",
                    "The second half of a ring: N-1 more steps, in which ranks forward complete chunks.")
    if all(abs(a - b) <= 1e-2 * b for case in cases.values() for a, b in zip(case["values"], expected, strict=True)):
        raise Wrong("rounded", rank, f"{what}, in {dtype}, the type of the tensor",
                    f"{got}, nearly the sum: it was rounded",
                    "In which type do ranks send chunks, and in which type do they add them?",
                    "torch.empty_like(chunk) has the type of the chunk.")
    wrong("divided", all(value * size == right for case in cases.values()
                         for value, right in zip(case["values"], expected, strict=True)),
          f"1/{size} of the sum: a mean over ranks", "The exercise asks for the sum. Which line divides?",
          "Add the received values, and do not divide.")
    # Compare with other reductions over ranks than the sum.
    columns = torch.stack([input_of(r, length, size, dtype).double() for r in range(size)])
    everywhere = torch.tensor([case["values"] for case in cases.values()], dtype=torch.float64)
    for op in ("amax", "amin", "prod"):
        wrong("other-op", torch.allclose(everywhere, getattr(columns, op)(0).expand_as(everywhere)),
              f"the {op.strip('a')} over ranks, complete on all of them",
              "The messages of the ring are right. What do you do with a chunk that arrives in the first half?",
              "Add chunks: incoming += received.")
    sent = [sum(name == "send" for name, *_ in case["operations"]) for case in cases.values()]
    # Each element's sum, read as digits in base BASE, says how often each rank's values are in it.
    everything = [_times(case["values"][i], i, size, dtype) for case in cases.values() for i in range(length)]
    wrong("other-values", None in everything, got,
          "This is not a sum of the ranks' values. Does a receive overwrite data that you still need?",
          "Receive into a separate tensor, then add it to the chunk.")
    wrong("written-over", any(max(times) > 1 and 0 in times for times in everything), got,
          "In the first half, a received chunk overwrites the chunk of this rank. Where do you receive it?",
          "Receive into a new tensor, torch.empty_like(chunk), and add this tensor: chunk += received.")
    wrong("counted-twice", any(count > 1 for times in everything for count in times), got,
          "A value is added more than once. In the second half, are received chunks added, or copied?",
          "Add only in the first N-1 steps; copy in the other N-1 steps.")
    wrong("one-rank-each", all(sum(times) == 1 for times in everything), f"{got}, and nowhere the sum of two ranks",
          "Do you add in the tensor itself, and do you send the complete chunk, or overwrite it?",
          "incoming += received adds in the view, incoming = incoming + received makes a new tensor. In the second "
          "half, first send the chunk that was completed last.")
    complete = sum(times == (1,) * size for times in everything)
    wrong("half-a-ring", complete == length and set(sent) == {size - 1},
          f"{got}; each rank has one complete chunk, after {size - 1} messages",
          "The first half of the ring is right. How do the other ranks receive the complete chunk of a rank?",
          "Run N-1 more steps. In each, send a complete chunk, and receive one directly into its place.")
    by_rank = [list(zip(*everything[length * r : length * (r + 1)], strict=True)) for r in range(size)]
    deaf = [(r, other) for r in range(size) for other in range(size) if not any(by_rank[r][other])]
    if deaf:
        wrong("never-heard", True, got,
              "Rank {} has no values of rank {}. Which rank sends to which rank?".format(*deaf[0]),
              "In a ring of N ranks a value reaches the last rank after N - 1 steps.")
    wrong("incomplete", True, f"{got}; {complete} of {size * length} elements of all ranks are complete",
          "Which chunk is complete on a rank after N-1 steps? Send this chunk first. In each later step send the "
          "chunk that has just arrived.",
          "Step s of the first half: send chunk (rank - s - 1) % N, receive chunk (rank - s - 2) % N and add. Step s "
          "of the second half: send chunk (rank - s) % N, receive chunk (rank - s - 1) % N.")


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
    said = [f"rank {rank} ({'once' if n == 1 else f'{n} times'})" for rank, n in enumerate(times) if n]
    return "the values of " + ", ".join(said)


def _judge_waits(cases) -> None:
    for rank, case in cases.items():
        open_, started = case["sends"]
        if open_:
            raise Wrong("not-waited", rank, "a wait() for each send that is started with async_op=True",
                        f"{open_} of {started} sends without a wait(), with {case['length']} elements",
                        "The values are right by chance. When may you change a tensor that is being sent?",
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
                    "The check counts only messages of this comm. How else did values reach other ranks?",
                    "Use comm.send and comm.recv of the comm that your function receives.")
    rank = max(sums, key=lambda rank: sums[rank][1])
    wrong = rows(rank)
    wrong("wider-type", sums[rank][1] > most and cases[0]["dtype"] == "float32",
          f"at most {most:,} bytes from each rank: 4 for each number of float32",
          f"{sums[rank][1]:,} bytes, and with float64 it was right", "In which type do ranks send chunks here?",
          "torch.empty_like(chunk) has the type of the chunk; do not use .double().")
    wrong("bytes", sums[rank][1] > most, f"at most {most:,} bytes from each rank, for {length} elements",
          f"{sums[rank][1]:,} bytes in {sums[rank][0]} messages",
          "The values are right, but this rank sends too many bytes. Does it send whole arrays, or too often?",
          "2 (N-1) steps, each with one chunk, an N-th of the tensor: 2 (N-1)/N of the tensor in all.")
    if length != lengths(size)[0]:
        return  # empty chunks need no message
    few = min(sums, key=lambda rank: sums[rank][0])
    if sums[few][0] < 2 * (size - 1):
        raise Wrong("messages", few, f"{2 * (size - 1)} messages from each rank, on {size} ranks", f"{sums[few][0]}",
                    "The values are right, but this is not a ring. How many messages does each rank send in a ring?",
                    "Divide the tensor into comm.size chunks; send one chunk in each of 2 (N-1) steps.")
    many = max(sums, key=lambda rank: sums[rank][0])
    if sums[many][0] > 8 * (size - 1):
        raise Wrong("messages", many, f"about {2 * (size - 1)} messages from each rank, on {size} ranks",
                    f"{sums[many][0]}", "Each message costs latency. How many do you send for one chunk?",
                    "comm.send(chunk, right, async_op=True): the whole chunk, in one call, in each of 2 (N-1) steps.")
    for rank, case in cases.items():
        to = {dest for name, dest, *_ in case["operations"] if name == "send"}
        if len(to) > 2:
            raise Wrong("no-ring", rank, "messages only to neighbours", f"messages to the ranks {sorted(to)}",
                        "The values and the number of bytes are right. To how many other ranks does one rank send?",
                        "In a ring a rank sends only to its right neighbour, (rank + 1) % N.")


def _sent(case) -> tuple[int, int]:
    return sum(messages for *_, messages, _ in case["operations"]), sum(count for *_, count in case["operations"])


EXERCISES = {
    "ring-fix": Exercise("ring_all_reduce", observe_ring, judge_ring, any_size=True),
    "ring-build": Exercise("my_all_reduce", observe_ring, judge_ring, any_size=True),
}
