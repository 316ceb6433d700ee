"""Plausible wrong answers to lesson 13, and the mistake that the check must recognise in each."""

import math

import torch

# fix: outer_step(comm, start, parameters, velocity, rate, momentum)


def momentum_on_own_gradient(comm, start, parameters, velocity, rate, momentum):
    """The planted bug: the velocity is made of this rank's gradient."""
    gradient = start - parameters
    velocity = momentum * velocity + gradient
    gradient = comm.all_reduce(gradient, op="mean")
    return start - rate * (gradient + momentum * velocity), velocity


def never_averages(comm, start, parameters, velocity, rate, momentum):
    gradient = start - parameters
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


def adds_gradients(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters)
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


def without_looking_ahead(comm, start, parameters, velocity, rate, momentum):
    velocity = momentum * velocity + comm.all_reduce(start - parameters, op="mean")
    return start - rate * velocity, velocity


def forgets_the_velocity(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    return start - rate * gradient, momentum * velocity + gradient


def rate_in_the_velocity(comm, start, parameters, velocity, rate, momentum):
    """The same while the rate stays as it is."""
    gradient = rate * comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return start - (gradient + momentum * velocity), velocity


def gradient_and_velocity_swapped(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return start - rate * (velocity + momentum * gradient), velocity


def uphill(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return start + rate * (gradient + momentum * velocity), velocity


def from_the_parameters(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return comm.all_reduce(parameters.clone(), op="mean") - rate * (gradient + momentum * velocity), velocity


def mean_divided_once_more(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean") / comm.size
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


def from_its_own_parameters(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return parameters - rate * (gradient + momentum * velocity), velocity


def returns_a_smaller_velocity(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start - parameters, op="mean")
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), momentum * velocity


def returns_the_start(comm, start, parameters, velocity, rate, momentum):
    return start


# fix: compress(comm, gradient, kept)


def signs(wanted):
    return wanted.sign() * wanted.abs().mean()


def signs_without_feedback(comm, gradient, kept):
    """The planted bug."""
    sent = signs(gradient)
    kept = gradient - sent
    return comm.all_reduce(sent, op="mean"), kept


def signs_that_forget(comm, gradient, kept):
    sent = signs(gradient + kept)
    return comm.all_reduce(sent.clone(), op="mean"), gradient - sent


def signs_less_the_mean(comm, gradient, kept):
    wanted = gradient + kept
    mean = comm.all_reduce(signs(wanted), op="mean")
    return mean, wanted - mean


def signs_that_keep_all(comm, gradient, kept):
    wanted = gradient + kept
    return comm.all_reduce(signs(wanted), op="mean"), wanted


def signs_and_what_was_kept(comm, gradient, kept):
    sent = signs(gradient) + kept
    return comm.all_reduce(sent.clone(), op="mean"), gradient - sent


def signs_that_keep_twice(comm, gradient, kept):
    wanted = gradient + kept
    sent = signs(wanted)
    return comm.all_reduce(sent.clone(), op="mean"), kept + wanted - sent


def signs_of_the_gradients_size(comm, gradient, kept):
    wanted = gradient + kept
    sent = wanted.sign() * gradient.abs().mean()
    return comm.all_reduce(sent.clone(), op="mean"), wanted - sent


def signs_of_the_difference(comm, gradient, kept):
    wanted = gradient - kept
    sent = signs(wanted)
    return comm.all_reduce(sent.clone(), op="mean"), wanted - sent


def signs_in_place(comm, gradient, kept):
    gradient += kept
    sent = signs(gradient)
    gradient -= sent
    return comm.all_reduce(sent, op="mean"), gradient


def signs_that_fade(comm, gradient, kept):
    wanted = gradient + kept
    sent = signs(wanted)
    return comm.all_reduce(sent.clone(), op="mean"), 0.9 * (wanted - sent)


def signs_of_the_largest(comm, gradient, kept):
    wanted = gradient + kept
    sent = wanted.sign() * wanted.abs().max()
    return comm.all_reduce(sent.clone(), op="mean"), wanted - sent


def signs_added(comm, gradient, kept):
    wanted = gradient + kept
    sent = signs(wanted)
    return comm.all_reduce(sent.clone()), wanted - sent


def signs_alone(comm, gradient, kept):
    wanted = gradient + kept
    return signs(wanted), wanted - signs(wanted)


# build: top_k(comm, gradient, kept, fraction)


def _exchanged(comm, wanted, fraction, divide=True):
    k = math.ceil(fraction * len(wanted))
    places = wanted.abs().topk(k).indices
    everyones = comm.all_gather(places.new_empty(comm.size * k), places)
    values = comm.all_gather(wanted.new_empty(comm.size * k), wanted[places])
    mean = torch.zeros_like(wanted).index_add_(0, everyones, values / comm.size if divide else values)
    return mean, wanted.index_fill(0, places, 0)


def top_k_without_feedback(comm, gradient, kept, fraction):
    return _exchanged(comm, gradient, fraction)


def top_k_that_forgets(comm, gradient, kept, fraction):
    mean, rest = _exchanged(comm, gradient + kept, fraction)
    return mean, rest - kept


def top_k_added(comm, gradient, kept, fraction):
    return _exchanged(comm, gradient + kept, fraction, divide=False)


def top_k_sends_zeros_too(comm, gradient, kept, fraction):
    wanted = gradient + kept
    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    sent = torch.zeros_like(wanted)
    sent[places] = wanted[places]
    return comm.all_reduce(sent.clone(), op="mean"), wanted - sent


def top_k_in_16_bits(comm, gradient, kept, fraction):
    mean, rest = _exchanged(comm, (gradient + kept).bfloat16(), fraction)
    return mean.double(), rest.double()


def top_k_by_short_places(comm, gradient, kept, fraction):
    wanted = gradient + kept
    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    theirs = comm.all_gather(torch.empty(comm.size * len(places), dtype=torch.uint8), places.to(torch.uint8))
    values = comm.all_gather(wanted.new_empty(comm.size * len(places)), wanted[places])
    mean = torch.zeros_like(wanted).index_add_(0, theirs.long(), values / comm.size)
    return mean, wanted.index_fill(0, places, 0)


def top_k_by_a_threshold(comm, gradient, kept, fraction):
    """All that are as large as the k-th: with many zeros these are all elements."""
    wanted = gradient + kept
    least = wanted.abs().topk(math.ceil(fraction * len(wanted))).values[-1]
    return _at_places(comm, wanted, (wanted.abs() >= least).nonzero().flatten())


def top_k_smallest(comm, gradient, kept, fraction):
    wanted = gradient + kept
    return _at_places(comm, wanted, wanted.abs().topk(math.ceil(fraction * len(wanted)), largest=False).indices)


def top_k_shared_out(comm, gradient, kept, fraction):
    return _exchanged(comm, gradient + kept, fraction / comm.size)


def top_k_of_sizes(comm, gradient, kept, fraction):
    wanted = gradient + kept
    sizes, places = wanted.abs().topk(math.ceil(fraction * len(wanted)))
    return _exchanged(comm, torch.zeros_like(wanted).index_put((places,), sizes), fraction)[0], wanted.index_fill(
        0, places, 0
    )


def top_k_over_who_sends(comm, gradient, kept, fraction):
    wanted = gradient + kept
    mean, rest = _exchanged(comm, wanted, fraction)
    senders = comm.all_reduce((rest != wanted).double())
    return mean * comm.size / senders.clamp(min=1), rest


def top_k_rounded_down(comm, gradient, kept, fraction):
    return _exchanged(comm, gradient + kept, int(fraction * len(gradient)) / len(gradient))


def top_k_of_the_gradient(comm, gradient, kept, fraction):
    """Places by the gradient, values of all that is wanted."""
    return _at_places(comm, gradient + kept, gradient.abs().topk(math.ceil(fraction * len(gradient))).indices)


def top_k_of_rank_0(comm, gradient, kept, fraction):
    wanted = gradient + kept
    places = comm.broadcast(wanted.abs().topk(math.ceil(fraction * len(wanted))).indices)
    return _at_places(comm, wanted, places)


def _at_places(comm, wanted, places, dropped=lambda everyones, places: places):
    everyones = comm.all_gather(places.new_empty(comm.size * len(places)), places)
    values = comm.all_gather(wanted.new_empty(len(everyones)), wanted[places])
    mean = torch.zeros_like(wanted).index_add_(0, everyones, values / comm.size)
    return mean, wanted.index_fill(0, dropped(everyones, places), 0)


def top_k_drops_the_others(comm, gradient, kept, fraction):
    """What any rank has sent is kept by none."""
    wanted = gradient + kept
    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    return _at_places(comm, wanted, places, lambda everyones, places: everyones)


def top_k_of_signed(comm, gradient, kept, fraction):
    """The largest, not the largest in size."""
    wanted = gradient + kept
    k = math.ceil(fraction * len(wanted))
    places = wanted.topk(k).indices
    everyones = comm.all_gather(places.new_empty(comm.size * k), places)
    values = comm.all_gather(wanted.new_empty(comm.size * k), wanted[places])
    mean = torch.zeros_like(wanted).index_add_(0, everyones, values / comm.size)
    return mean, wanted.index_fill(0, places, 0)


def top_k_overwrites(comm, gradient, kept, fraction):
    """Where two ranks send the same place, one of them is lost."""
    wanted = gradient + kept
    k = math.ceil(fraction * len(wanted))
    places = wanted.abs().topk(k).indices
    everyones = comm.all_gather(places.new_empty(comm.size * k), places)
    values = comm.all_gather(wanted.new_empty(comm.size * k), wanted[places])
    mean = torch.zeros_like(wanted)
    mean[everyones] = values / comm.size
    return mean, wanted.index_fill(0, places, 0)


def top_k_at_own_places(comm, gradient, kept, fraction):
    """The values are averaged, and the places are this rank's."""
    wanted = gradient + kept
    places = wanted.abs().topk(math.ceil(fraction * len(wanted))).indices
    mean = torch.zeros_like(wanted)
    mean[places] = comm.all_reduce(wanted[places].clone(), op="mean")
    return mean, wanted.index_fill(0, places, 0)


def top_k_keeps_all(comm, gradient, kept, fraction):
    mean, _ = _exchanged(comm, gradient + kept, fraction)
    return mean, gradient + kept


def top_k_returns_the_mean(comm, gradient, kept, fraction):
    return _exchanged(comm, gradient + kept, fraction)[0]


def velocity_stays_local(comm, start, parameters, velocity, rate, momentum):
    """The next start is averaged, and each rank returns its own velocity: starts come out right."""
    gradient = start - parameters
    velocity = momentum * velocity + gradient
    return start - rate * comm.all_reduce(gradient + momentum * velocity, op="mean"), velocity


def gradient_of_rank_0(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.broadcast(start - parameters)
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


def start_in_place(comm, start, parameters, velocity, rate, momentum):
    gradient = comm.all_reduce(start.sub_(parameters), op="mean")
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity


WRONG = {
    "outer-fix": {
        momentum_on_own_gradient: "ranks-differ",
        never_averages: "ranks-differ",
        adds_gradients: "sum",
        mean_divided_once_more: "divided-twice",
        without_looking_ahead: "heavy-ball",
        forgets_the_velocity: "no-momentum",
        uphill: "wrong-way",
        rate_in_the_velocity: "other-step",
        gradient_and_velocity_swapped: "other-step",
        from_the_parameters: "other-step",
        from_its_own_parameters: "own-parameters",
        returns_a_smaller_velocity: "momentum-twice",
        returns_the_start: "type",
        velocity_stays_local: "own-velocity",
        gradient_of_rank_0: "other-step",
        start_in_place: "other-step",
    },
    "feedback-fix": {
        signs_without_feedback: "no-feedback",
        signs_that_forget: "forgets",
        signs_less_the_mean: "of-the-mean",
        signs_that_keep_all: "keeps-all",
        signs_and_what_was_kept: "kept-sent-whole",
        signs_that_keep_twice: "kept-twice",
        signs_of_the_gradients_size: "gradient-scale",
        signs_of_the_difference: "feedback-subtracted",
        signs_in_place: "kept-is-gradient",
        signs_added: "sum",
        signs_that_fade: "kept-otherwise",
        signs_of_the_largest: "scaled",
        signs_alone: "alone",
    },
    "top-k-build": {
        top_k_without_feedback: "no-feedback",
        top_k_that_forgets: "forgets",
        top_k_added: "sum",
        top_k_sends_zeros_too: "too-many-bytes",
        top_k_rounded_down: "k-rounded",
        top_k_in_16_bits: "rounded",
        top_k_by_short_places: "small-places",
        top_k_by_a_threshold: "too-many-bytes",
        top_k_smallest: "smallest",
        top_k_shared_out: "k-shared-out",
        top_k_of_sizes: "unsigned",
        top_k_over_who_sends: "by-senders",
        top_k_of_the_gradient: "by-gradient",
        top_k_of_rank_0: "rank-0-places",
        top_k_drops_the_others: "others-dropped",
        top_k_of_signed: "signed",
        top_k_overwrites: "overwritten",
        top_k_at_own_places: "own-places",
        top_k_keeps_all: "keeps-all",
        top_k_returns_the_mean: "type",
    },
}
