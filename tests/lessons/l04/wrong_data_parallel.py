"""Plausible wrong hooks that average gradients, and the mistake that the check must recognise in each."""

# fix: average_with_hooks(comm, module)


def with_hooks(comm, module, act, broadcast=lambda module: [*module.parameters(), *module.buffers()], hooked=None):
    """The right answer, with its pieces to turn: ``act(parameter)`` is called when a gradient has arrived."""

    def gradient_is_ready(parameter):
        act(parameter)  # a hook returns nothing

    for tensor in broadcast(module):
        comm.broadcast(tensor)
    for parameter in hooked(module) if hooked else module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return module


def hooks_as_they_were(comm, module):
    """The planted bug: it is the parameter that travels."""
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.data, op="mean"))


def hooks_reduce_both(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad, op="mean")
        comm.all_reduce(parameter.data, op="mean")

    return with_hooks(comm, module, act)


def hooks_do_not_divide(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.grad))


def hooks_divide_twice(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad, op="mean")
        parameter.grad /= comm.size

    return with_hooks(comm, module, act)


def hooks_reduce_a_copy(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.grad.clone(), op="mean"))


def hooks_without_broadcast(comm, module):
    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), broadcast=lambda module: [])


def hooks_without_buffers(comm, module):
    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), lambda module: module.parameters())


def hooks_without_frozen(comm, module):
    def trained(module):
        return [*(p for p in module.parameters() if p.requires_grad), *module.buffers()]

    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), trained)


def hooks_on_both_names(comm, module):
    """Tied weights get two hooks, and are reduced twice."""

    def by_name(module):
        return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]

    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), hooked=by_name)


def hooks_take_the_largest(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.grad, op="max"))


def hooks_by_half(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad, op="mean").mul_(0.7)

    return with_hooks(comm, module, act)


def hooks_mix_up_elements(comm, module):
    def act(parameter):
        parameter.grad.copy_(comm.all_reduce(parameter.grad.flatten().flip(0), op="mean").view_as(parameter))

    return with_hooks(comm, module, act)


def hooks_reduce_to_rank_0(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.reduce(parameter.grad, root=0, op="mean"))


def hooks_broadcast_rank_0(comm, module):
    """Ranks stay alike, and all but one have computed for nothing."""
    return with_hooks(comm, module, lambda parameter: comm.broadcast(parameter.grad))


def hooks_in_half_precision(comm, module):
    def act(parameter):
        parameter.grad.copy_(comm.all_reduce(parameter.grad.half(), op="mean"))

    return with_hooks(comm, module, act)


def hooks_on_weights_alone(comm, module):
    return with_hooks(
        comm, module, lambda parameter: comm.all_reduce(parameter.grad, op="mean") if parameter.dim() > 1 else None
    )


def hooks_divide_by_three(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad)
        parameter.grad /= 3

    return with_hooks(comm, module, act)


def hooks_on_the_world(comm, module):
    """Not on the ranks that it was given."""
    import dtlib

    everywhere = dtlib.init().comm
    return with_hooks(comm, module, lambda p: everywhere.all_reduce(p.grad, op="mean"))


WRONG = {
    "hook-fix": {
        hooks_as_they_were: "parameter-reduced",
        hooks_reduce_both: "parameter-reduced",
        hooks_do_not_divide: "not-divided",
        hooks_divide_twice: "divided-twice",
        hooks_reduce_a_copy: "not-averaged",
        hooks_without_broadcast: "not-broadcast",
        hooks_without_buffers: "buffers-not-broadcast",
        hooks_without_frozen: "frozen-not-broadcast",
        hooks_on_both_names: "tied-twice",
        hooks_take_the_largest: "other-op",
        hooks_by_half: "scaled",
        hooks_mix_up_elements: "other-values",
        hooks_in_half_precision: "rounded",
        hooks_reduce_to_rank_0: "only-root",
        hooks_broadcast_rank_0: "one-rank's",
        hooks_on_weights_alone: "left-out",
        hooks_divide_by_three: "other-size",
        hooks_on_the_world: "other-size",
    },
}
