"""torch's own tests of process groups, which its wheel carries, on our backend: those that gloo passes on the CPU.

Each test has a process group of its own, on ranks that live on as long as tests pass; after a failure, or a hang, they
are started anew. Which tests gloo passes, and on how many ranks, stands in ``torchs_own_tests.txt`` (of tests of groups
that want more than 3 ranks those on 8), and is found out in the same way:

    python -m tests.test_torchs_own_tests gloo 3 [names]
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import SkipTest

import pytest

SECONDS = 60  # for one test
GRACE_SECONDS = 5  # for the other ranks, once one has failed
CHOOSE_BY_NAME = ("test_accumulate_gradients",)
NOT_OURS = {
    "monitored_barrier": "torch keeps it for gloo: 'monitored_barrier is only implemented for GLOO backend.'",
    "any_source": "refused: a message is received from a rank that the program names",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.nightly)])
def test_what_gloo_passes(ranks):
    lines = Path(__file__).with_name("torchs_own_tests.txt").read_text().splitlines()
    ours = [line for line in lines if not any(part in line for part in NOT_OURS)]
    assert len(ours) >= 0.93 * len(lines) > 100  # on 3 and on 8 ranks together
    found = outcomes("dtlib", ranks, [name for number, name in map(str.split, ours) if int(number) == ranks])
    assert len(found) > 40
    assert {name: said for name, said in found.items() if said != "passed"} == {}


def outcomes(backend: str, ranks: int, names) -> dict[str, str]:
    """Run these tests; each one's outcome is "passed", "skipped: why", or what went wrong."""
    from dtlib.world.launch import start_ranks

    found, names = {}, list(names)
    while remaining := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "names").write_text("\n".join(remaining))
            command = ["-m", "tests.test_torchs_own_tests", "rank", backend, folder]
            with open(os.path.join(folder, "output"), "w") as output:
                process = start_ranks(
                    command, ranks, env={"WORLD_SIZE": str(ranks)}, stdout=output, stderr=subprocess.STDOUT
                )
                process.wait()
            begun = 0
            for name in remaining:
                said = [Path(folder, f"{name}.{rank}") for rank in range(ranks)]
                if not any(file.exists() for file in said):
                    break
                begun += 1
                said = [file.read_text() if file.exists() else "hangs" for file in said]
                bad = [one for one in said if one != "passed"]
                worst = next((one for one in bad if not one.startswith(("skipped", "hangs"))), bad[0] if bad else None)
                found[name] = worst or "passed"
            if not begun:
                found[remaining[0]] = "hangs, or ends the process: " + Path(folder, "output").read_text()[-2000:]
    return found


def on_this_rank(backend: str, folder: str) -> None:
    from mpi4py import MPI

    import dtlib.backend  # noqa: F401

    everyone = MPI.COMM_WORLD
    rank, size = everyone.Get_rank(), everyone.Get_size()
    os.environ["BACKEND"], os.environ["TEMP_DIR"] = backend, folder
    cases = torchs_cases(backend)
    for name in Path(folder, "names").read_text().split():
        place = Path(folder, "of " + name)
        if rank == 0:
            for part in ("test_dir", "barrier", "init_dir"):
                (place / part).mkdir(parents=True)
        everyone.Barrier()
        os.environ["TEMP_DIR"] = str(place)
        ended = threading.Event()
        threading.Thread(target=watch, args=(folder, name, rank, size, ended), daemon=True).start()
        outcome = outcome_of(cases, backend, name, rank, size, place)
        Path(folder, f"{name}.{rank}").write_text(outcome)
        if outcome.startswith("failed"):
            time.sleep(GRACE_SECONDS)
            os._exit(1)
        everyone.Barrier()
        ended.set()


def torchs_cases(backend: str):
    """torch's class of tests, in which our backend is one of those that can do such things."""
    from torch.testing._internal.common_distributed import DistTestCases

    for backends in DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(backend)
    from torch.testing._internal.distributed import distributed_test

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return Cases


def outcome_of(cases, backend, name, rank, size, place) -> str:
    from torch import distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test

    # Some tests choose what they do by the name of the backend, and do nothing for one that they do not know.
    distributed_test.BACKEND = "gloo" if name.startswith(CHOOSE_BY_NAME) else backend
    said_by = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    distributed_test.Barrier.barrier_id = 0
    set_rng_seed()
    try:
        case = cases(name)
        case.rank, case.file_name = rank, str(place / "store")
        limit = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
        dist.init_process_group(
            init_method=case.init_method, backend=backend, world_size=size, rank=rank, timeout=timedelta(seconds=limit)
        )
        case._barrier()
        getattr(case, name)()
        case._barrier()
        dist.destroy_process_group()
        return "passed"
    except SkipTest as skip:
        return skipped(dist, str(skip))
    except SystemExit as end:
        return skipped(dist, said_by[end.code]) if end.code in said_by else f"failed: exit {end.code}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"


def skipped(dist, why: str) -> str:
    if dist.is_initialized():
        dist.destroy_process_group()
    return f"skipped: {why}"


def watch(folder, name, rank, size, ended) -> None:
    """End this process if a test takes too long here, or has failed elsewhere."""
    began, failed_since = time.monotonic(), None
    while not ended.wait(0.1):
        others = [Path(folder, f"{name}.{other}") for other in range(size) if other != rank]
        if failed_since is None and any(file.exists() and file.read_text().startswith("failed") for file in others):
            failed_since = time.monotonic()
        late = time.monotonic() - began > SECONDS
        if late or (failed_since is not None and time.monotonic() - failed_since > GRACE_SECONDS):
            own = Path(folder, f"{name}.{rank}")
            if not own.exists():
                own.write_text("hangs")
            os._exit(1)


def all_names() -> list[str]:
    os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=tempfile.gettempdir())
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    return sorted(name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_"))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        on_this_rank(*sys.argv[2:])
    else:
        _, backend, ranks, *names = sys.argv
        found = outcomes(backend, int(ranks), names or all_names())
        print(json.dumps(found, indent=1))
