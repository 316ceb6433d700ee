"""Runs of a ring all-reduce: results, and messages of every rank."""

import time

LONG = 5000
# Factor of all values on at most four ranks. float32 cannot represent it, so rounding is detected.
UNIT = 2**24 + 1
# Rank r contributes BASE**r, so digit r of the sum is the number of times that rank r was added.
BASE = 64


def lengths(ranks: int) -> tuple[int, ...]:
    """Return the lengths to test.

    Lengths are divisible by the number of ranks, not divisible, shorter than the number of ranks, one, and zero. The
    last length has chunks so long that MPI sends them only when the receive is posted.
    """
    return 12 * ranks, 13 * ranks - 1, max(1, ranks - 1), 1, 0, LONG * ranks


def observe_ring(all_reduce, comm):
    """Return for each length, and one case in float32, the result and the operations of this rank.

    An operation is (name, destination, messages, bytes).
    """
    cases = []
    wanted = [(length, "float64") for length in lengths(comm.size)]
    # With more ranks sums would not be exact in float32.
    if comm.size <= 4:
        wanted.append((lengths(comm.size)[0], "float32"))
    for length, dtype in wanted:
        case = _observed(all_reduce, length, dtype, comm)
        cases.append(case)
        if "error" in case:
            break  # after an error the communicator cannot be used again
    return cases


def _observed(all_reduce, length, dtype, comm):
    from mpi4py import MPI

    from dtlib.comm.watch.recorder import recording
    from dtlib.errors import WaitTimeout
    from dtlib.lab.checks.judging import explain_error
    from dtlib.lab.checks.pending_handles import count_unfinished, watched_handles

    tensor = input_of(comm.rank, length, comm.size, dtype)
    memory = tensor.view_as(tensor)  # stays the original memory, if the answer gives the tensor another one
    case = {"length": length, "dtype": dtype, "itemsize": tensor.element_size()}
    with recording() as events, watched_handles(comm) as handles:
        try:
            got = all_reduce(comm, tensor)
        except (WaitTimeout, MPI.Exception) as error:
            case.update(error=str(error), waited=True)
        except Exception as error:
            got, hints = explain_error(error, all_reduce)
            case.update(error=got, hints=hints, waited=False)
        else:
            case["sends"] = count_unfinished(handles)
            let_messages_leave(events)
            case.update(values=(memory if len(tensor) == length else tensor).tolist(), returned=_as_list(got))
    case["operations"] = [
        (event.name, event.peer if event.name == "send" else None, event.messages, event.bytes)
        for event in events
        if event.kind == "operation"
    ]
    return case


def input_of(rank, length, ranks, dtype):
    """Return the input of a rank; the sum over ranks shows how often each rank was added (see ``BASE``)."""
    import torch

    return unit_of(ranks, dtype) * BASE**rank * (1 + torch.arange(length, dtype=getattr(torch, dtype)) % 3)


def unit_of(ranks: int, dtype: str) -> int:
    """Return the factor of all values: large where the sums stay exact in ``dtype``, otherwise 1."""
    return UNIT if ranks <= 4 and dtype == "float64" else 1  # otherwise sums would not be exact


def let_messages_leave(events, seconds: float = 1.0) -> None:
    """Wait until pending messages have left, because only then they are counted."""
    from dtlib.comm.waiting import advance_all

    events, deadline = list(events), time.monotonic() + seconds
    while any(event.end is None for event in events) and time.monotonic() < deadline:
        advance_all()
        time.sleep(0.001)


def _as_list(got):
    return got.tolist() if hasattr(got, "tolist") else None
