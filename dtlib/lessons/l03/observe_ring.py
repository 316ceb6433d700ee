"""A ring all-reduce, observed: what comes out, and what every rank sends for it."""

import time

LONG = 5000
UNIT = 2**24 + 1  # of all values, on a few ranks: float32 cannot hold it
BASE = 64  # rank r puts in powers of this, so that a digit of the sum says how often its values are in it


def lengths(ranks: int) -> tuple[int, ...]:
    """A length that divides by the ranks, one that does not, one shorter than the ranks, one element, none; and chunks
    so long that their messages wait for a receive (MPI sends short ones ahead)."""
    return 12 * ranks, 13 * ranks - 1, max(1, ranks - 1), 1, 0, LONG * ranks


def observe_ring(all_reduce, comm):
    """For each length, and once more in float32: the result here, and the operations used, as (name, destination,
    messages, bytes)."""
    cases = []
    wanted = [(length, "float64") for length in lengths(comm.size)]
    if comm.size <= 4:  # sums of more ranks would not be exact in float32
        wanted.append((lengths(comm.size)[0], "float32"))
    for length, dtype in wanted:
        case = _observed(all_reduce, length, dtype, comm)
        cases.append(case)
        if "error" in case:
            break  # this communicator is of no use any more
    return cases


def _observed(all_reduce, length, dtype, comm):
    from mpi4py import MPI

    from dtlib.comm.watch.recorder import recording
    from dtlib.errors import WaitTimeout
    from dtlib.lab.checks.checks import told
    from dtlib.lab.checks.sends import not_waited_for, watched_handles

    tensor = input_of(comm.rank, length, comm.size, dtype)
    memory = tensor.view_as(tensor)  # what others see, if the answer lets the tensor have another memory
    case = {"length": length, "dtype": dtype, "itemsize": tensor.element_size()}
    with recording() as events, watched_handles(comm) as handles:
        try:
            got = all_reduce(comm, tensor)
        except (WaitTimeout, MPI.Exception) as error:
            case.update(error=str(error), waited=True)
        except Exception as error:
            got, hints = told(error, all_reduce)
            case.update(error=got, hints=hints, waited=False)
        else:
            case["sends"] = not_waited_for(handles)
            let_messages_leave(events)
            case.update(values=(memory if len(tensor) == length else tensor).tolist(), returned=_as_list(got))
    case["operations"] = [
        (event.name, event.peer if event.name == "send" else None, event.messages, event.bytes)
        for event in events
        if event.kind == "operation"
    ]
    return case


def input_of(rank, length, ranks, dtype):
    import torch

    return unit_of(ranks, dtype) * BASE**rank * (1 + torch.arange(length, dtype=getattr(torch, dtype)) % 3)


def unit_of(ranks: int, dtype: str) -> int:
    return UNIT if ranks <= 4 and dtype == "float64" else 1  # sums of more ranks would not be exact in float64


def let_messages_leave(events, seconds: float = 1.0) -> None:
    """They are counted once they have left, whether the answer has waited for them or not."""
    from dtlib.comm.waiting import advance_all

    events, deadline = list(events), time.monotonic() + seconds
    while any(event.end is None for event in events) and time.monotonic() < deadline:
        advance_all()
        time.sleep(0.001)


def _as_list(got):
    return got.tolist() if hasattr(got, "tolist") else None
