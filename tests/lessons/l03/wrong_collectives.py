"""Plausible wrong answers to lesson 03, and the mistake that the check must recognise in each.

The last entry of each is the number of ranks from which on the mistake shows: two ranks hide some.
"""

import torch


def ring(comm, tensor, chunks, first=1, second=0, add=True, steps=None, combine=torch.Tensor.add_):
    """A ring with its indices to turn: in step s it sends chunk (rank - s - first), later chunk (rank - s - second)."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for phase, shift in (("reduce", first), ("gather", second)):
        for step in range(size - 1 if steps is None else steps):
            outgoing, incoming = chunks[(rank - step - shift) % size], chunks[(rank - step - shift - 1) % size]
            received = torch.empty_like(incoming)
            sending = comm.send(outgoing, right, async_op=True)
            comm.recv(received, left)
            sending.wait()
            if phase == "reduce":
                combine(incoming, received)
            elif add:
                incoming.copy_(received)
            else:
                incoming += received
    return tensor


# fix: ring_all_reduce(comm, array)


def as_it_was(comm, array):
    """The planted bug: the second half passes on a chunk that is not complete."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(array, size)
    for step in range(size - 1):
        received = torch.empty_like(chunks[(rank - step - 2) % size])
        sending = comm.send(chunks[(rank - step - 1) % size], right, async_op=True)
        comm.recv(received, left)
        sending.wait()
        chunks[(rank - step - 2) % size].add_(received)
    for step in range(size - 1):
        sending = comm.send(chunks[(rank - step - 1) % size].clone(), right, async_op=True)
        comm.recv(chunks[(rank - step - 1) % size], left)
        sending.wait()
    return array


def the_other_index_turned(comm, array):
    """Half fixed: now both indices of the second half are one too far."""
    return ring(comm, array, torch.tensor_split(array, comm.size), second=1)


def adds_in_the_second_half(comm, array):
    return ring(comm, array, torch.tensor_split(array, comm.size), add=False)


def first_half_moved_instead(comm, array):
    """Half fixed: the other index is turned so that both begin alike."""
    return ring(comm, array, torch.tensor_split(array, comm.size), first=1, second=2)


def one_step_short(comm, array):
    return ring(comm, array, torch.tensor_split(array, comm.size), steps=max(0, comm.size - 2))


def calls_the_library(comm, array):
    return comm.all_reduce(array, algorithm="ring")


# build: my_all_reduce(comm, tensor)


def everything_to_rank_0(comm, tensor):
    """Right values, but rank 0 sends and receives it all."""
    received = torch.empty_like(tensor)
    if comm.rank > 0:
        comm.send(tensor, 0)
        return comm.recv(tensor, 0)
    for other in range(1, comm.size):
        tensor += comm.recv(received, other)
    for other in range(1, comm.size):
        comm.send(tensor, other)
    return tensor


def everybody_to_everybody(comm, tensor):
    mine, received = tensor.clone(), torch.empty_like(tensor)
    sends = [comm.send(mine, other, async_op=True) for other in range(comm.size) if other != comm.rank]
    for other in range(comm.size):
        if other != comm.rank:
            tensor += comm.recv(received, other)
    for sending in sends:
        sending.wait()
    return tensor


def whole_arrays_round_the_ring(comm, tensor):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    outgoing = tensor.clone()
    for _ in range(comm.size - 1):
        received = torch.empty_like(tensor)
        sending = comm.send(outgoing, right, async_op=True)
        comm.recv(received, left)
        sending.wait()
        tensor += received
        outgoing = received
    return tensor


def only_the_root_adds(comm, tensor):
    if comm.rank > 0:
        comm.send(tensor, 0)
        return tensor
    for other in range(1, comm.size):
        tensor += comm.recv(torch.empty_like(tensor), other)
    return tensor


def forgets_the_remainder(comm, tensor):
    length = len(tensor) // comm.size
    chunks = [tensor[length * chunk : length * (chunk + 1)] for chunk in range(comm.size)]
    return ring(comm, tensor, chunks)


def raises_on_a_remainder(comm, tensor):
    return ring(comm, tensor, list(tensor.view(comm.size, -1)))


def off_by_one_chunk(comm, tensor):
    return ring(comm, tensor, torch.tensor_split(tensor, comm.size), second=-1)


def garbage_with_the_right_messages(comm, tensor):
    """As many messages and bytes as the ring, and no sum: a check that only counts lets it pass."""
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(2 * (comm.size - 1)):
        incoming = chunks[(comm.rank - step - 1) % comm.size]
        sending = comm.send(torch.full_like(chunks[(comm.rank - step) % comm.size], -999), right, async_op=True)
        comm.recv(incoming, left)
        sending.wait()
    return tensor.fill_(-999)


def receives_over_its_own(comm, tensor):
    """The chunk is overwritten instead of added to."""
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(2 * (comm.size - 1)):
        sending = comm.send(chunks[(comm.rank - step) % comm.size].clone(), right, async_op=True)
        comm.recv(chunks[(comm.rank - step - 1) % comm.size], left)
        sending.wait()
    return tensor


def not_in_place(comm, tensor):
    new = tensor.clone()
    return ring(comm, new, torch.tensor_split(new, comm.size))


def another_memory(comm, tensor):
    """The name has the sum, and whoever looks at the memory that was passed does not."""
    new = tensor.clone()
    ring(comm, new, torch.tensor_split(new, comm.size))
    tensor.data = new


def everybody_receives_first(comm, tensor):
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        received = torch.empty_like(chunks[(comm.rank - step - 2) % comm.size])
        comm.recv(received, left)
        comm.send(chunks[(comm.rank - step - 1) % comm.size], right)
        chunks[(comm.rank - step - 2) % comm.size].add_(received)
    return tensor


def everybody_sends_first(comm, tensor, async_op=False, waits=lambda adds: False):
    """Right with short messages, which MPI sends ahead; with long ones all wait for a receive."""
    rank, size = comm.rank, comm.size
    chunks = torch.tensor_split(tensor, size)
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        outgoing = rank - step - 1 if adds else rank - step + size - 1
        incoming = chunks[(outgoing - 1) % size]
        sending = comm.send(chunks[outgoing % size].clone(), (rank + 1) % size, async_op=async_op)
        received = comm.recv(torch.empty_like(incoming), (rank - 1) % size)
        if waits(adds):
            sending.wait()
        incoming.copy_(incoming + received if adds else received)
    return tensor


def never_waits(comm, tensor):
    """The handles are dropped."""
    return everybody_sends_first(comm, tensor, async_op=True)


def waits_in_the_first_half(comm, tensor):
    """And is over before its last sends are."""
    return everybody_sends_first(comm, tensor, async_op=True, waits=lambda adds: adds)


def travels_in_single_precision(comm, tensor):
    single = tensor.float()
    ring(comm, single, torch.tensor_split(single, comm.size))
    tensor.copy_(single)


def travels_in_double_precision(comm, tensor):
    """Twice the bytes for a tensor of float32."""
    double = tensor.double()
    ring(comm, double, torch.tensor_split(double, comm.size))
    tensor.copy_(double)


def takes_float64_for_granted(comm, tensor):
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(2 * (comm.size - 1)):
        adds = step < comm.size - 1
        outgoing = comm.rank - step - 1 if adds else comm.rank - step + comm.size - 1
        incoming = chunks[(outgoing - 1) % comm.size]
        received = torch.empty(len(incoming), dtype=torch.float64)
        sending = comm.send(chunks[outgoing % comm.size], right, async_op=True)
        comm.recv(received, left)
        sending.wait()
        incoming.copy_(incoming + received if adds else received)


def takes_float32_for_granted(comm, tensor):
    """What torch.empty gives."""
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        received = torch.empty(len(chunks[(comm.rank - step - 2) % comm.size]))
        sending = comm.send(chunks[(comm.rank - step - 1) % comm.size], right, async_op=True)
        comm.recv(received, left)
        sending.wait()


def receives_half_the_type_by_mpi4py(comm, tensor):
    """An array of numpy's float32 for a message of float64."""
    chunks = torch.tensor_split(tensor, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = comm.mpi.Isend(chunks[comm.rank].numpy(), right)
    comm.mpi.Recv(torch.empty(len(chunks[left])).numpy(), left)
    sending.Wait()


def element_by_element(comm, tensor):
    """A ring in which every element is a message."""
    rank, size = comm.rank, comm.size
    if len(tensor) > 1000:  # to be rejected sooner
        return ring(comm, tensor, torch.tensor_split(tensor, size))
    chunks = torch.tensor_split(tensor, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(2 * (size - 1)):
        shift = 1 if step < size - 1 else 0
        outgoing = chunks[(rank - step % (size - 1) - shift) % size]
        incoming = chunks[(rank - step % (size - 1) - shift - 1) % size]
        sends = [comm.send(outgoing[i : i + 1].clone(), right, async_op=True) for i in range(len(outgoing))]
        for i in range(len(incoming)):
            received = comm.recv(torch.empty_like(incoming[i : i + 1]), left)
            incoming[i : i + 1] = received + (incoming[i : i + 1] if shift else 0)
        for sending in sends:
            sending.wait()
    return tensor


def straight_to_the_owner(comm, tensor):
    """No more bytes than the ring, but everybody talks to everybody."""
    chunks = torch.tensor_split(tensor, comm.size)
    mine = chunks[comm.rank]
    theirs = [torch.zeros_like(mine) for _ in chunks]

    def exchange(outgoing, incoming):
        for shift in range(1, comm.size):
            to, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
            sending = comm.send(outgoing[to], to, async_op=True)
            comm.recv(incoming[source], source)
            sending.wait()

    exchange(chunks, theirs)
    mine += sum(theirs)
    exchange([mine] * comm.size, chunks)
    return tensor


def a_mean(comm, tensor):
    ring(comm, tensor, torch.tensor_split(tensor, comm.size))
    tensor /= comm.size


def takes_the_largest(comm, tensor):
    chunks = torch.tensor_split(tensor, comm.size)
    return ring(comm, tensor, chunks, combine=lambda a, b: torch.maximum(a, b, out=a))


def adds_to_a_new_tensor(comm, tensor):
    return ring(comm, tensor, torch.tensor_split(tensor, comm.size), combine=torch.Tensor.add)


def first_half_alone(comm, tensor):
    """Each rank has one chunk complete, and keeps it to itself."""
    rank, size, chunks = comm.rank, comm.size, torch.tensor_split(tensor, comm.size)
    for step in range(size - 1):
        incoming = chunks[(rank - step - 1) % size]
        received = torch.empty_like(incoming)
        sending = comm.send(chunks[(rank - step) % size], (rank + 1) % size, async_op=True)
        comm.recv(received, (rank - 1) % size)
        sending.wait()
        incoming += received


def skips_empty_chunks(comm, tensor):
    """Who sends leaves them out, and who receives does not."""
    rank, size, chunks = comm.rank, comm.size, torch.tensor_split(tensor, comm.size)
    for step in range(2 * (size - 1)):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        received = torch.empty_like(incoming)
        sending = comm.send(outgoing, (rank + 1) % size, async_op=True) if len(outgoing) else None
        comm.recv(received, (rank - 1) % size)
        if sending:
            sending.wait()
        incoming.copy_(received + incoming * (step < size - 1))


def ring_in_three_chunks(comm, tensor):
    return ring(comm, tensor, torch.tensor_split(tensor, 3))


def receives_into_the_chunk(comm, tensor):
    """In the first half, too: what is to be added to is gone."""
    rank, size = comm.rank, comm.size
    chunks = torch.tensor_split(tensor, size)
    for first, add in ((1, True), (0, False)):
        for step in range(size - 1):
            incoming = chunks[(rank - step - first - 1) % size]
            sending = comm.send(chunks[(rank - step - first) % size].clone(), (rank + 1) % size, async_op=True)
            comm.recv(incoming, (rank - 1) % size)
            sending.wait()
            if add:
                incoming += incoming.clone()


def partners_by_powers_of_two(comm, tensor):
    """Recursive doubling, where ranks are no power of two."""
    distance = 1
    while distance < comm.size:
        partner, received = comm.rank ^ distance, torch.empty_like(tensor)
        if partner < comm.size:
            sending = comm.send(tensor.clone(), partner, async_op=True)
            comm.recv(received, partner)
            sending.wait()
            tensor += received
        distance *= 2


WRONG = {
    "ring-fix": {
        as_it_was: ("incomplete", 2),
        the_other_index_turned: ("one-rank-each", 2),
        adds_in_the_second_half: ("counted-twice", 2),
        first_half_moved_instead: ("incomplete", 3),  # on two ranks two chunks further is the same chunk
        one_step_short: ("never-heard", 3),
        calls_the_library: ("collective-inside", 2),
        never_waits: ("not-waited", 2),
    },
    "ring-build": {
        everything_to_rank_0: ("bytes", 3),  # on two ranks the bytes are those of the ring
        everybody_to_everybody: ("bytes", 3),
        whole_arrays_round_the_ring: ("bytes", 3),
        only_the_root_adds: ("only-root", 2),
        forgets_the_remainder: ("remainder", 2),
        raises_on_a_remainder: ("remainder", 2),
        off_by_one_chunk: ("incomplete", 3),
        adds_in_the_second_half: ("counted-twice", 2),
        garbage_with_the_right_messages: ("other-values", 2),
        receives_over_its_own: ("one-rank-each", 2),
        not_in_place: ("not-in-place", 2),
        another_memory: ("nothing-done", 2),
        everybody_receives_first: ("waited", 2),
        everybody_sends_first: ("long-messages", 2),
        calls_the_library: ("collective-inside", 2),
        waits_in_the_first_half: ("not-waited", 2),
        travels_in_single_precision: ("rounded", 2),
        travels_in_double_precision: ("wider-type", 2),
        takes_float64_for_granted: ("other-type", 2),
        takes_float32_for_granted: ("other-type", 2),
        receives_half_the_type_by_mpi4py: ("truncated", 2),
        element_by_element: ("messages", 2),
        a_mean: ("divided", 2),
        takes_the_largest: ("other-op", 2),
        adds_to_a_new_tensor: ("one-rank-each", 2),
        first_half_alone: ("half-a-ring", 2),
        skips_empty_chunks: ("other-chunk", 3),
        straight_to_the_owner: ("no-ring", 4),  # with fewer ranks everybody is a neighbour
        ring_in_three_chunks: "other-size",
        receives_into_the_chunk: ("written-over", 2),
        partners_by_powers_of_two: ("never-heard", 3),
    },
}

# On two ranks the bytes cannot tell: the number of messages does.
NAMED = {
    "ring-build": {
        f"{answer.__name__} on two ranks": (answer, ("messages", 2))
        for answer in (everything_to_rank_0, everybody_to_everybody, whole_arrays_round_the_ring)
    },
}
