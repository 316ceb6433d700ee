"""Two hosts with a network between them, on one machine: dtlib's worlds across hosts, and what a message costs."""

import json
from functools import partial

import pytest

from tests import hosts

LATENCY, BANDWIDTH = 0.010, 20e6
EAGER = 65536  # Open MPI's tcp: a message that is longer is announced first, and sent once the other side answers
PING_PONG = (1_000, 30_000, 60_000, 300_000, 900_000)  # bytes
WITHIN = 0.15
TRIES = 3
REPEATS = 12
CASES = (("recursive_doubling", 4), ("recursive_doubling", 40_000), ("ring", 100_000), ("ring", 800_000))  # bytes

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())]


def measure() -> None:
    """On each rank: ping-pong and all-reduce in turns, each the fastest of some, as the slowest rank saw it; rank 0
    prints. In turns, so that what another program takes of the machine is taken of the model and of what it is for."""
    import time

    import torch

    import dtlib

    comm = dtlib.init().comm
    peer = 1 - comm.rank

    def seconds(operation) -> float:
        """The hosts share a clock, so ranks begin together; after a barrier they would be a latency apart."""
        begins = comm.broadcast_object(time.monotonic() + 5 * LATENCY)
        while time.monotonic() < begins:
            time.sleep(0)
        operation()
        took = torch.tensor(time.monotonic() - begins, dtype=torch.float64)
        return comm.all_reduce(took, op="max").item()

    def ping_pong(tensor):
        for sender in (0, 1):
            comm.send(tensor, peer) if comm.rank == sender else comm.recv(tensor, peer)

    operations = {str(size): partial(ping_pong, torch.zeros(size, dtype=torch.uint8)) for size in PING_PONG}
    for algorithm, count in CASES:
        operations[f"{algorithm} {count}"] = partial(comm.all_reduce, torch.zeros(count // 4), algorithm=algorithm)
    took = [{name: seconds(operation) for name, operation in operations.items()} for _ in range(REPEATS)]
    if comm.rank == 0:
        print(json.dumps({name: min(each[name] for each in took) for name in operations}))


def test_an_all_reduce_across_hosts_costs_what_its_messages_do(tmp_path):
    """latency + n / bandwidth a message, fitted by ping-pong; three latencies where it is above the eager limit."""
    import numpy as np

    def latencies(count):
        return 3 if count > EAGER else 1

    with hosts.Hosts(tmp_path, LATENCY, BANDWIDTH) as both:
        for _ in range(TRIES):  # another program may have had the processors
            said = both.run_ranks(["-m", "tests.test_hosts"])
            seconds = json.loads(said.splitlines()[-1])
            took = np.array([seconds[str(size)] / 2 for size in PING_PONG])
            model = np.array([(latencies(size), size) for size in PING_PONG])
            alpha, beta = np.linalg.lstsq(model / took[:, None], np.ones(len(took)))[0]  # errors are relative ones
            expected = {}
            for algorithm, count in CASES:  # on two ranks a ring is two rounds of half of it
                rounds = 2 if algorithm == "ring" else 1
                expected[f"{algorithm} {count}"] = rounds * latencies(count / rounds) * alpha + count * beta
            off = {name: seconds[name] / expected[name] - 1 for name in expected}
            _, announced = np.polyfit(PING_PONG[-2:], took[-2:], 1)  # of long messages alone
            said = (
                f"alpha {alpha * 1e3:.2f} ms, {1e-6 / beta:.1f} MB/s; a long message has {announced / alpha:.2f} "
                f"latencies; off the model: {', '.join(f'{name} {value:+.1%}' for name, value in off.items())}"
            )
            print(said)
            if max(map(abs, off.values())) < WITHIN and 2.5 < announced / alpha < 3.5:
                break
        else:
            pytest.fail(said)
        assert 0.9 * LATENCY < alpha < 1.5 * LATENCY and 0.7 * BANDWIDTH < 1 / beta < 1.3 * BANDWIDTH


if __name__ == "__main__":
    measure()
