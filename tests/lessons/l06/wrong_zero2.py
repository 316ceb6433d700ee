"""Plausible wrong ways to share out gradients, and the mistake that the check must recognise in each."""

import torch

# fix: shard_gradients(comm, module)


def with_hooks(comm, module, act):
    """The right answer, with a piece to turn: ``act(parameter, flat, length)`` gives this rank's shard."""
    shards = {}

    def gradient_is_ready(parameter):
        length = -(-parameter.numel() // comm.size)
        flat = torch.zeros(length * comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        shards[parameter] = act(parameter, flat, length)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return shards


def scattered(comm, flat, length, op="mean"):
    return comm.reduce_scatter(torch.empty(length, dtype=flat.dtype), flat, op=op)


def shard_of(flat, rank, length):
    return flat[rank * length : (rank + 1) * length]


def shards_as_it_was(comm, module):
    """The planted bug: everybody gets everything, and keeps it behind a view."""

    def act(parameter, flat, length):
        comm.all_reduce(flat, op="mean")
        parameter.grad = None
        return shard_of(flat, comm.rank, length)

    return with_hooks(comm, module, act)


def shards_after_an_all_reduce(comm, module):
    """Little memory, and twice the bytes."""

    def act(parameter, flat, length):
        comm.all_reduce(flat, op="mean")
        parameter.grad = None
        return shard_of(flat, comm.rank, length).clone()

    return with_hooks(comm, module, act)


def shards_a_view(comm, module):
    """What travels is right; its shard lies in the flat memory, and keeps all of it."""

    def act(parameter, flat, length):
        parameter.grad = None
        return comm.reduce_scatter(shard_of(flat, comm.rank, length), flat, op="mean")

    return with_hooks(comm, module, act)


def shards_and_keeps_gradients(comm, module):
    return with_hooks(comm, module, lambda parameter, flat, length: scattered(comm, flat, length))


def shards_and_keeps_copies(comm, module):
    """Whole gradients hidden on the function, for whoever may want them."""

    def act(parameter, flat, length):
        parameter.grad = None
        shards_and_keeps_copies.flats[parameter] = flat
        return scattered(comm, flat, length)

    shards_and_keeps_copies.flats = {}
    return with_hooks(comm, module, act)


def shards_gradients_as_zeros(comm, module):
    """zero_grad as it was once: the memory stays."""

    def act(parameter, flat, length):
        parameter.grad.zero_()
        return scattered(comm, flat, length)

    return with_hooks(comm, module, act)


def shards_sums(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat, length, op="sum")

    return with_hooks(comm, module, act)


def shards_divided_twice(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat, length) / comm.size

    return with_hooks(comm, module, act)


def shards_what_was_sent(comm, module):
    """reduce_scatter leaves ``flat`` as it was, and that is what is kept."""

    def act(parameter, flat, length):
        scattered(comm, flat, length)
        parameter.grad = None
        return shard_of(flat, comm.rank, length).clone()

    return with_hooks(comm, module, act)


def shards_the_next_shard(comm, module):
    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat.roll(length), length)

    return with_hooks(comm, module, act)


def shards_nothing(comm, module):
    return {}


def shards_memory_by_length(comm, module):
    """One tensor for all shards that are as long: the last gradient writes over the others."""
    rooms = {}

    def act(parameter, flat, length):
        parameter.grad = None
        own = rooms.setdefault(length, torch.empty(length, dtype=flat.dtype))
        return comm.reduce_scatter(own, flat, op="mean")

    return with_hooks(comm, module, act)


def shards_without_padding(comm, module):
    """Right values, and shards of unequal lengths, which no all_gather takes."""

    def act(parameter, flat, length):
        parameter.grad = None
        return scattered(comm, flat, length)[: max(0, parameter.numel() - comm.rank * length)].clone()

    return with_hooks(comm, module, act)


def shards_with_ones_as_padding(comm, module):
    """torch.ones in place of torch.zeros: the values are right."""

    def act(parameter, flat, length):
        parameter.grad = None
        flat[parameter.numel() :] = 1
        return scattered(comm, flat, length)

    return with_hooks(comm, module, act)


def shards_and_keeps_arrays(comm, module):
    """Whole gradients as arrays, in a closure."""
    arrays = {}

    def act(parameter, flat, length):
        parameter.grad = None
        arrays[parameter] = flat.numpy().copy()
        return scattered(comm, flat, length)

    return with_hooks(comm, module, act)


def shards_for_three(comm, module):
    """The number three is written into it."""
    shards = {}

    def gradient_is_ready(parameter):
        length = -(-parameter.numel() // 3)
        flat = torch.zeros(length * 3, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        shards[parameter] = scattered(comm, flat, length)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return shards


def shards_cut_off(comm, module):
    """Shards are rounded down: the last elements are nobody's."""

    def act(parameter, flat, length):
        length = parameter.numel() // comm.size
        shard = scattered(comm, parameter.grad.flatten()[: length * comm.size].clone(), length)
        parameter.grad = None
        return shard

    return with_hooks(comm, module, act)


WRONG = {
    "zero2-fix": {
        shards_as_it_was: "all-reduced",
        shards_after_an_all_reduce: "all-reduced",
        shards_a_view: "memory-kept",
        shards_and_keeps_gradients: "gradients-kept",
        shards_and_keeps_copies: "memory-kept",
        shards_gradients_as_zeros: "gradients-kept",
        shards_sums: "not-divided",
        shards_divided_twice: "divided-twice",
        shards_what_was_sent: "not-averaged",
        shards_the_next_shard: "other-shard",
        shards_nothing: "no-shard",
        shards_memory_by_length: "shared-memory",
        shards_cut_off: "tail-forgotten",
        shards_without_padding: "no-padding",
        shards_with_ones_as_padding: "padding-not-zero",
        shards_and_keeps_arrays: "memory-kept",
        shards_for_three: "other-size",
    },
}
