"""Plausible wrong ways to share out gradients, and the mistake that the check must recognise in each."""

import torch

# mend: share_gradients(comm, module)


def with_hooks(comm, module, act):
    """The right answer, with a piece to turn: ``act(parameter, flat, length)`` gives this rank's part."""
    parts = {}

    def gradient_has_come(parameter):
        length = -(-parameter.numel() // comm.size)
        flat = torch.zeros(length * comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        parts[parameter] = act(parameter, flat, length)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_has_come)
    return parts


def scattered(comm, flat, length, op="mean"):
    return comm.reduce_scatter(torch.empty(length, dtype=flat.dtype), flat, op=op)


def part_of(flat, rank, length):
    return flat[rank * length : (rank + 1) * length]


def shares_as_it_was(comm, module):
    """The planted bug: everybody gets everything, and keeps it behind a view."""

    def act(parameter, flat, length):
        comm.all_reduce(flat, op="mean")
        parameter.grad = None
        return part_of(flat, comm.rank, length)

    return with_hooks(comm, module, act)


def shares_after_an_all_reduce(comm, module):
    """Little memory, and twice the bytes."""

    def act(parameter, flat, length):
        comm.all_reduce(flat, op="mean")
        parameter.grad = None
        return part_of(flat, comm.rank, length).clone()

    return with_hooks(comm, module, act)


def shares_a_view(comm, module):
    """What travels is right; its part lies in the flat memory, and keeps all of it."""

    def act(parameter, flat, length):
        parameter.grad = None
        return comm.reduce_scatter(part_of(flat, comm.rank, length), flat, op="mean")

    return with_hooks(comm, module, act)


def shares_and_keeps_gradients(comm, module):
    return with_hooks(comm, module, lambda parameter, flat, length: scattered(comm, flat, length))


def shares_and_keeps_copies(comm, module):
    """Whole gradients hidden on the function, for whoever may want them."""

    def act(parameter, flat, length):
        parameter.grad = None
        shares_and_keeps_copies.flats[parameter] = flat
        return scattered(comm, flat, length)

    shares_and_keeps_copies.flats = {}
    return with_hooks(comm, module, act)


def shares_gradients_as_zeros(comm, module):
    """zero_grad as it was once: the memory stays."""

    def act(parameter, flat, length):
        parameter.grad.zero_()
        return scattered(comm, flat, length)

    return with_hooks(comm, module, act)


def shares_sums(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat, length, op="sum")

    return with_hooks(comm, module, act)


def shares_divided_twice(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat, length) / comm.size

    return with_hooks(comm, module, act)


def shares_what_was_sent(comm, module):
    """reduce_scatter leaves ``flat`` as it was, and that is what is kept."""

    def act(parameter, flat, length):
        scattered(comm, flat, length)
        parameter.grad = None
        return part_of(flat, comm.rank, length).clone()

    return with_hooks(comm, module, act)


def shares_the_next_part(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat.roll(length), length)

    return with_hooks(comm, module, act)


def shares_nothing(comm, module):
    return {}


def shares_memory_by_length(comm, module):
    """One tensor for all parts that are as long: the last gradient writes over the others."""
    rooms = {}

    def act(parameter, flat, length):
        parameter.grad = None
        own = rooms.setdefault(length, torch.empty(length, dtype=flat.dtype))
        return comm.reduce_scatter(own, flat, op="mean")

    return with_hooks(comm, module, act)


WRONG = {
    "zero2-mend": {
        shares_as_it_was: "all-reduced",
        shares_after_an_all_reduce: "all-reduced",
        shares_a_view: "memory-kept",
        shares_and_keeps_gradients: "gradients-kept",
        shares_and_keeps_copies: "memory-kept",
        shares_gradients_as_zeros: "gradients-kept",
        shares_sums: "not-divided",
        shares_divided_twice: "divided-twice",
        shares_what_was_sent: "not-averaged",
        shares_the_next_part: "other-part",
        shares_nothing: "no-part",
        shares_memory_by_length: "shared-memory",
    },
}
