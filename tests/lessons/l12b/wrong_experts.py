"""Plausible wrong answers to lesson 12b, and the mistake that the check must recognise in each."""

import torch

# fix: balance(comm, probabilities, chosen)


def share_of(chosen, experts):
    return chosen.flatten().bincount(minlength=experts) / chosen.numel()


def share_of_this_rank(comm, probabilities, chosen):
    """The planted bug."""
    experts = probabilities.shape[1]
    return experts * (share_of(chosen, experts) * probabilities.mean(0)).sum()


def never_attached(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen, experts), op="mean")
    return experts * (share * probabilities.detach().mean(0)).sum()


def averaged_by_hand(comm, probabilities, chosen):
    """The mean of all ranks' probabilities, by an all_reduce that autograd does not know."""
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen, experts), op="mean")
    return experts * (share * comm.all_reduce(probabilities.detach().mean(0), op="mean")).sum()


def shares_added(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    return experts * (comm.all_reduce(share_of(chosen, experts)) * probabilities.mean(0)).sum()


def share_of_rank_0(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    return experts * (comm.broadcast(share_of(chosen, experts)) * probabilities.mean(0)).sum()


def ranks_for_experts(comm, probabilities, chosen):
    share = comm.all_reduce(share_of(chosen, probabilities.shape[1]), op="mean")
    return comm.size * (share * probabilities.mean(0)).sum()


def choices_over_tokens(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = chosen.flatten().bincount(minlength=experts) / len(chosen)
    return experts * (comm.all_reduce(share, op="mean") * probabilities.mean(0)).sum()


def without_the_factor(comm, probabilities, chosen):
    share = comm.all_reduce(share_of(chosen, probabilities.shape[1]), op="mean")
    return (share * probabilities.mean(0)).sum()


def divided_once_more(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen, experts), op="mean")
    return experts * (share * probabilities.mean(0)).sum() / comm.size


def no_choices_in_it(comm, probabilities, chosen):
    experts, mean = probabilities.shape[1], probabilities.mean(0)
    return experts * (comm.all_reduce(mean.detach().clone(), op="mean") * mean).sum()


def first_choices_alone(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen[:, :1], experts), op="mean")
    return experts * (share * probabilities.mean(0)).sum()


def not_a_mean(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen, experts), op="mean")
    return experts * (share * probabilities.sum(0)).sum()


def one_less(comm, probabilities, chosen):
    """As if the best balance had to be a loss of zero."""
    experts = probabilities.shape[1]
    share = comm.all_reduce(share_of(chosen, experts), op="mean")
    return experts * (share * probabilities.mean(0)).sum() - 1


def a_loss_each(comm, probabilities, chosen):
    share = comm.all_reduce(share_of(chosen, probabilities.shape[1]), op="mean")
    return share * probabilities.mean(0)


# build: dispatch(comm, x, chosen, expert)


def there(comm, x, chosen, order):
    counts = chosen.bincount(minlength=comm.size)
    received = comm.all_to_all(torch.empty_like(counts), counts).tolist()
    arrived = comm.all_to_all(x.new_empty(sum(received), x.shape[1]), x[order], received, counts.tolist())
    return arrived, received, counts.tolist()


def own_expert(comm, x, chosen, expert):
    """The stub."""
    return expert(x)


def back_in_order_of_experts(comm, x, chosen, expert):
    arrived, received, sent = there(comm, x, chosen, chosen.argsort(stable=True))
    return comm.all_to_all(torch.empty_like(x), expert(arrived), sent, received)


def sorted_once_more(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    arrived, received, sent = there(comm, x, chosen, order)
    return comm.all_to_all(torch.empty_like(x), expert(arrived), sent, received)[order]


def as_many_for_each(comm, x, chosen, expert):
    """Places for a part of the tokens with each expert; who finds none is lost."""
    places, out = 2, torch.zeros_like(x)
    rows, at = x.new_zeros(comm.size, places, x.shape[1]), []
    for rank in range(comm.size):
        at.append((chosen == rank).nonzero()[:places, 0])
        rows[rank, : len(at[-1])] = x[at[-1]]
    arrived = comm.all_to_all(torch.empty_like(rows), rows)
    back = comm.all_to_all(torch.empty_like(rows), expert(arrived.flatten(0, 1)).view_as(rows))
    for rank in range(comm.size):
        out[at[rank]] = back[rank, : len(at[rank])]
    return out


def without_experts(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    arrived, received, sent = there(comm, x, chosen, order)
    out = torch.empty_like(x)
    out[order] = comm.all_to_all(torch.empty_like(x), arrived, sent, received)
    return out


def never_sent_back(comm, x, chosen, expert):
    return expert(there(comm, x, chosen, chosen.argsort(stable=True))[0])


def not_sorted(comm, x, chosen, expert):
    arrived, received, sent = there(comm, x, chosen, torch.arange(len(x)))
    return comm.all_to_all(torch.empty_like(x), expert(arrived), sent, received)


def everyone_gets_all(comm, x, chosen, expert):
    """By objects and floats: all tokens to all ranks, and what their experts compute back to all."""
    lengths = comm.all_gather_object(len(x))
    longest = max(lengths)
    padded = torch.cat([x, x.new_zeros(longest - len(x), x.shape[1])])
    tokens = comm.all_gather(x.new_empty(comm.size, *padded.shape), padded)
    done = expert(tokens.flatten(0, 1)).view_as(tokens)
    whole = comm.all_gather(done.new_empty(comm.size, *done.shape), done)
    return whole[chosen, comm.rank, torch.arange(len(x))]


def padded_to_the_longest(comm, x, chosen, expert):
    places = max(comm.all_gather_object(len(x)))
    rows, at = x.new_zeros(comm.size, places, x.shape[1]), []
    for rank in range(comm.size):
        at.append((chosen == rank).nonzero()[:, 0])
        rows[rank, : len(at[-1])] = x[at[-1]]
    arrived = comm.all_to_all(torch.empty_like(rows), rows)
    back = comm.all_to_all(torch.empty_like(rows), expert(arrived.flatten(0, 1)).view_as(rows))
    out = torch.empty_like(x)
    for rank in range(comm.size):
        out[at[rank]] = back[rank, : len(at[rank])]
    return out


def through_objects(comm, x, chosen, expert):
    """All rows to all ranks, as objects, which are bytes and no floats."""
    everyones = comm.all_gather_object((x, chosen))
    done = comm.all_gather_object([expert(rows) for rows, _ in everyones])
    out = torch.empty_like(x)
    for token, rank in enumerate(chosen.tolist()):
        out[token] = done[rank][comm.rank][token]
    return out


def all_rows_as_integers(comm, x, chosen, expert):
    """All rows to all ranks, in the disguise of integers."""
    lengths = comm.all_gather_object(len(x))
    padded = torch.cat([x, x.new_zeros(max(lengths) - len(x), x.shape[1])]).view(torch.int64)
    tokens = comm.all_gather(padded.new_empty(comm.size, *padded.shape), padded)
    done = expert(tokens.view(x.dtype).flatten(0, 1)).view(torch.int64).view_as(tokens)
    whole = comm.all_gather(done.new_empty(comm.size, *done.shape), done).view(x.dtype)
    return whole[chosen, comm.rank, torch.arange(len(x))]


def float32_buffers(comm, x, chosen, expert):
    arrived, received, sent = there(comm, x.float(), chosen, chosen.argsort(stable=True))
    out = torch.empty_like(x)
    back = comm.all_to_all(torch.empty(x.shape), expert(arrived.to(x.dtype)).float(), sent, received)
    out[chosen.argsort(stable=True)] = back.to(x.dtype)
    return out


def leaves_early_without_tokens(comm, x, chosen, expert):
    if len(x) == 0:
        return x
    order = chosen.argsort(stable=True)
    arrived, received, sent = there(comm, x, chosen, order)
    out = torch.empty_like(x)
    out[order] = comm.all_to_all(torch.empty_like(x), expert(arrived), sent, received)
    return out


def half_on_the_way_back(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    arrived, received, sent = there(comm, x, chosen, order)
    out = torch.empty_like(x)
    out[order] = comm.all_to_all(torch.empty_like(x), expert(arrived).half().double(), sent, received)
    return out


WRONG = {
    "balance-fix": {
        share_of_this_rank: "own-share",
        never_attached: "detached",
        averaged_by_hand: "detached",
        shares_added: "summed",
        choices_over_tokens: "of-tokens",
        share_of_rank_0: "one-ranks-share",
        ranks_for_experts: "ranks-for-experts",
        without_the_factor: "without-experts",
        divided_once_more: "divided-twice",
        no_choices_in_it: "probabilities-twice",
        first_choices_alone: "other-gradient",
        not_a_mean: "sum-of-probabilities",
        one_less: "other-value",
        a_loss_each: "type",
    },
    "dispatch-build": {
        own_expert: "own-expert",
        back_in_order_of_experts: "not-in-order",
        sorted_once_more: "not-in-order",
        as_many_for_each: "lost",
        without_experts: "unchanged",
        never_sent_back: "type",
        not_sorted: "other-rows",
        everyone_gets_all: "too-many-bytes",
        padded_to_the_longest: "too-many-bytes",
        through_objects: "too-many-bytes",
        all_rows_as_integers: "too-many-bytes",
        float32_buffers: "rounded",
        leaves_early_without_tokens: "waited",
        half_on_the_way_back: "rounded",
    },
}
