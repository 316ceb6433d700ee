"""The state of a ZeroOptimizer as one optimizer of all parameters would have it, gathered from shards and cut up.

shard of rank 0   exp_avg[0:4]  \
shard of rank 1   exp_avg[4:8]   }  exp_avg in the shape of the parameter; numbers such as ``step`` are alike on all
"""

import torch
from torch import optim

from dtlib.errors import DtlibError

MASTER = "master"  # of a parameter in 16 bits
COUNTERS = ("step", "eta", "mu", "mu_product")  # one number a parameter, even if that has no dimension itself


def whole_state(zero, to: int) -> dict | None:
    """On rank ``to`` the dictionary that torch's ``state_dict`` would be, in host memory; None on the others."""
    if not 0 <= to < zero.comm.size:
        raise DtlibError(f"consolidate_state_dict(to={to}): choose a rank from 0 to {zero.comm.size - 1}.")
    whole = optim.Optimizer.state_dict(zero)
    whole["state"] = {}
    for i, parameter in enumerate(_parameters(zero)):
        if parameter not in zero._shard_of:
            continue
        slice_, value, master = zero._shard_of[parameter]
        mine = {key: _on_host(state) for key, state in zero.optim.state.get(master, {}).items()}
        if master is not value:
            mine[MASTER] = _on_host(master)
        cut = {key for key, state in mine.items() if isinstance(state, torch.Tensor) and state.dim() == 1}
        everyones = zero.comm.all_gather_object(mine)  # one parameter at a time, so that no rank holds all but one
        if zero.comm.rank == to and mine:
            whole["state"][i] = {
                key: torch.cat([theirs[key] for theirs in everyones]).view(slice_.shape) if key in cut else state
                for key, state in mine.items()
            }
    return whole if zero.comm.rank == to else None


def take_whole_state(zero, whole: dict) -> None:
    """Cut a whole state and give the local optimizer its shard."""
    optim.Optimizer.load_state_dict(zero, {**whole, "state": {}})
    local = zero.optim.state_dict()
    places = {master: i for i, master in enumerate(p for group in zero.optim.param_groups for p in group["params"])}
    for mine, theirs in zip(local["param_groups"], zero.param_groups, strict=True):
        mine.update(settings_of(theirs))
    local["state"] = {}
    for i, parameter in enumerate(_parameters(zero)):
        if parameter not in zero._shard_of:
            continue
        slice_, value, master = zero._shard_of[parameter]
        state = dict(whole["state"].get(i, {}))
        saved = state.pop(MASTER, parameter)
        if master is not value:
            with torch.no_grad():
                master.copy_(saved.reshape(-1)[slice_.start : slice_.stop])
        if state:
            local["state"][places[master]] = {key: _cut(key, one, slice_) for key, one in state.items()}
    zero.optim.load_state_dict(local)


def load_state(zero, state_dict: dict) -> None:
    """Take this rank's shard, or the whole."""
    if "param_groups" in state_dict:
        return take_whole_state(zero, state_dict)
    place = state_dict.get("rank"), state_dict.get("size")
    if place != (zero.comm.rank, zero.comm.size):
        raise DtlibError(
            f"This state is that of rank {place[0]} of {place[1]}, and this is rank {zero.comm.rank} of "
            f"{zero.comm.size}: use dtlib.checkpoint, which moves between numbers of ranks, or consolidate_state_dict."
        )
    zero.optim.load_state_dict(state_dict["optimizer"])
    with torch.no_grad():
        for master, saved in zip(zero.masters.masters, state_dict["masters"], strict=True):
            master.copy_(saved)
    for mine, local in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        mine.update(settings_of(local))


def settings_of(group: dict) -> dict:
    """Learning rate and the like of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _on_host(state):
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def _cut(key: str, state, slice_):
    """Memory of its own: a view would keep the whole, and torch's optimizers write into what they have loaded."""
    if not isinstance(state, torch.Tensor):
        return state
    is_whole = key not in COUNTERS and tuple(state.shape) == slice_.shape
    return (state.reshape(-1)[slice_.start : slice_.stop] if is_whole else state).clone()


def _parameters(zero) -> list:
    """In the order in which torch numbers them."""
    return [parameter for group in zero.param_groups for parameter in group["params"]]
