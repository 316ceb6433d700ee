"""Who listens where: a world on one machine cannot be reached from another one."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from torch import distributed as dist

from dtlib.errors import CommunicationError, DtlibError
from dtlib.world import compiled, launch, loopback
from dtlib.world.processes import Process, end_processes, listening, with_descendants
from tests.cases import refuses
from tests.ranks import on_ranks

JOIN = """
import os, time
import dtlib
world = dtlib.init()
ours = {name: os.environ.get(name) for name in ("LD_PRELOAD", "OMPI_MCA_btl", "OMPI_MCA_pml")}
everyone = world.comm.all_gather_object(str(ours))
if world.rank == 0:
    print(chr(10).join(everyone), flush=True)
time.sleep(60)
"""
TOLD = [name for pair in loopback.COUNTS for name in pair] + [
    *("SLURM_STEP_NUM_NODES", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME", "PMIX_RANK", "PMI_RANK"),
    *loopback.SCHEDULERS,
]


def outside(sockets) -> list:
    """Those of ``(name, address, port)`` that can be reached from another machine."""
    return [each for each in sockets if not ipaddress.ip_address(each[1]).is_loopback]


def look(process, ranks=2):
    """What the ranks print, and who listens while they run; then they are ended."""
    with process:
        said = [process.stdout.readline().strip() for _ in range(ranks)]
        found = listening(Process.of(process.pid))
        end_processes(with_descendants(Process.of(process.pid)))
    return said, found


def test_ranks_that_dtlib_starts_and_their_mpiexec(tmp_path, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    if not loopback.starts_only_local_ranks(launch.find_mpiexec()):
        pytest.skip("mpiexec may have ranks to start on other machines here")
    try:
        loopback.library()
    except DtlibError as problem:
        pytest.skip(str(problem))
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    said, found = look(launch.start_ranks([str(script)], 2, stdout=subprocess.PIPE, text=True))
    # Neither the library nor what was chosen for MPI is handed on to what ranks start.
    assert said == [str({"LD_PRELOAD": "", "OMPI_MCA_btl": None, "OMPI_MCA_pml": None})] * 2
    assert found and not outside(found)  # mpiexec itself listens


@pytest.mark.parametrize("chosen", [None, "self,sm,tcp"])
def test_ranks_under_somebody_s_own_mpiexec(tmp_path, monkeypatch, chosen):
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    command = [launch.find_mpiexec(), "--oversubscribe", "-n", "2", sys.executable, str(script)]
    env = {**os.environ, **launch.rank_environment(2), **({"OMPI_MCA_btl": chosen} if chosen else {})}
    said, found = look(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    assert said == [str({"LD_PRELOAD": None, "OMPI_MCA_btl": chosen, "OMPI_MCA_pml": None})] * 2
    ranks = [each for each in found if each[0].startswith("python")]
    assert bool(outside(ranks)) == bool(chosen)  # what the user asks for is done


@on_ranks(2)
def test_stores_and_groups(world):
    from dtlib.comm.torch.group_work import make_group
    from dtlib.comm.torch.store import shared_store

    before = set(listening(Process.of(os.getpid())))  # of other tests that ran in this process
    store = shared_store(world.comm)
    make_group({"cpu": "gloo"}, store, world.rank, world.size)
    assert isinstance(store, dist.FileStore)
    new = set(listening(Process.of(os.getpid()))) - before
    assert new and not outside(new)
    world.comm.barrier()
    if sys.platform == "linux":  # the file has no name left, so nothing is left over, however ranks end
        handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
        links = [os.readlink(handle) for handle in handles if os.path.islink(handle)]
        files = [link for link in links if "dtlib-store" in link]
        assert files and all(link.endswith("(deleted)") for link in files)


@on_ranks(2, 3)
def test_a_store_of_several_machines(world):
    """Ranks that cannot open one file meet at an address that all of them reach, whatever machines are called."""
    from dtlib.comm.torch import store

    reach, addresses, known = store._reach, store._addresses, os.environ.pop("GLOO_SOCKET_IFNAME", None)
    folder, hostname, last = store.folder_in_memory, socket.gethostname, world.rank == world.size - 1
    try:
        store.folder_in_memory = lambda: "nowhere"  # so no file is made
        socket.gethostname = lambda: f"machine-{world.rank}.invalid"
        # The first is nobody's, the second is not reached by the last rank, and 127.0.0.3 stands for a card.
        store._addresses = lambda: {"192.0.2.1": "gone", "127.0.0.2": "far", "127.0.0.3": "card"}
        store._reach = lambda address, port: None if last and address == "127.0.0.2" else reach(address, port)
        made = store.shared_store(world.comm)
        assert isinstance(made, dist.TCPStore) and made.host == "127.0.0.3"
        made.set(f"rank {world.rank}", b"here")
        made.wait([f"rank {rank}" for rank in range(world.size)])
        world.comm.barrier()
        listeners = [address for _, address, _ in listening(Process.of(os.getpid()))]
        assert listeners.count("127.0.0.3") == (world.rank == 0) and "127.0.0.2" not in listeners

        store._reach = lambda address, port: None if last else reach(address, port)
        with pytest.raises(CommunicationError, match=f"machine-{world.size - 1}.invalid reach none of these"):
            store.shared_store(world.comm)
    finally:
        store._reach, store._addresses, store.folder_in_memory = reach, addresses, folder
        socket.gethostname = hostname
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update({"GLOO_SOCKET_IFNAME": known} if known else {})


@pytest.mark.parametrize("told,here", [
    ({}, True),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, True),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, False),
    ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False),
    ({"WORLD_SIZE": "2"}, False),
    ({"PMIX_RANK": "0", "SLURM_STEP_NUM_NODES": "1"}, True),
    ({"PMIX_RANK": "0", "SLURM_STEP_NUM_NODES": "2"}, False),
    ({"PMI_RANK": "0"}, False),
])  # fmt: skip
def test_whether_all_ranks_are_here(monkeypatch, told, here):
    for name in (*TOLD, *loopback.SHARED_MEMORY):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert loopback.all_ranks_here() == here
    with loopback.shared_memory():
        assert {name: os.environ.get(name) for name in loopback.SHARED_MEMORY} == (
            loopback.SHARED_MEMORY if here else dict.fromkeys(loopback.SHARED_MEMORY)
        )
    assert not set(loopback.SHARED_MEMORY) & set(os.environ)
    monkeypatch.setattr(loopback, "SEGMENT", 2**60)  # /dev/shm has less: Open MPI may then need its tcp
    with loopback.shared_memory():
        assert "OMPI_MCA_btl" not in os.environ or not os.access("/dev/shm", os.W_OK)


@pytest.mark.parametrize("told,inside", [
    ({}, True),
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}, True),
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, False),
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}, False),
    ({"PBS_JOBID": "7"}, False),
    ({"PRTE_MCA_prte_default_hostfile": "hosts"}, False),
])  # fmt: skip
def test_whether_mpiexec_starts_ranks_here_alone(monkeypatch, tmp_path, told, inside):
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    mpiexec = str(tmp_path / "bin" / "mpiexec")
    assert loopback.starts_only_local_ranks(mpiexec) == inside
    hosts = tmp_path / "etc" / "prte-default-hostfile"
    hosts.write_text("# none\n\n")
    assert loopback.starts_only_local_ranks(mpiexec) == inside
    hosts.write_text("# some\nn1 slots=4\n")
    assert not loopback.starts_only_local_ranks(mpiexec)
    assert loopback.closed(mpiexec) == [mpiexec]


@pytest.fixture
def look_again():
    """`library()` forgets what it found."""
    loopback.library.cache_clear()
    yield
    loopback.library.cache_clear()


def test_a_command_line_that_names_hosts_is_left_alone(tmp_path):
    """The library is loaded, and does nothing: ranks on another machine must reach mpiexec."""
    try:
        library = loopback.library()
    except DtlibError as problem:
        pytest.skip(str(problem))
    program = (
        "import socket\n"
        "import sys\n"
        "v4, v6 = socket.socket(), socket.socket(socket.AF_INET6)\n"
        "v4.bind((sys.argv[1], 0)), v6.bind((sys.argv[2], 0))\n"
        "print(v4.getsockname()[0], v6.getsockname()[0])"
    )

    def bound(*arguments, v4="", v6="::"):
        command = [sys.executable, "-c", program, v4, v6, *arguments]
        return subprocess.run(command, env={**os.environ, "LD_PRELOAD": library}, capture_output=True, text=True).stdout

    assert bound("-n", "2") == "127.0.0.1 ::1\n"
    # Open MPI 5.0.8 names the machine's own address; this machine has none of these, and could not bind to them.
    assert bound("-n", "2", v4="198.51.100.7", v6="2001:db8::7") == "127.0.0.1 ::1\n"
    assert bound("-n", "2", v4="127.0.0.5") == "127.0.0.5 ::1\n"
    for hosts in ("-H", "--host", "-hostfile", "--machinefile", "--default-hostfile=x"):
        assert bound(hosts) == "0.0.0.0 ::\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")
def test_without_the_library_ranks_start_all_the_same(monkeypatch, tmp_path, look_again):
    spaced = tmp_path / "with space"
    monkeypatch.setenv("XDG_CACHE_HOME", str(spaced))
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(spaced))
    refuses("set XDG_CACHE_HOME to a folder without spaces", loopback.library)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses("no C compiler", loopback.library)
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    refuses(r"does not compile loopback.c \(no header\)", loopback.library)
    assert loopback.closed("/bin/mpiexec") == ["/bin/mpiexec"]
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo broken > "$2"\n')
    refuses("cannot be loaded", loopback.library)
    folder = tmp_path / "cache" / "dtlib"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # anybody could put a library there
    refuses("there is no private folder for it", loopback.library)


def test_a_program_that_ends_with_its_parent(tmp_path):
    """Also where the parent has threads; a thread that ends takes nothing along."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, subprocess, sys, threading, time\n"
        "from dtlib.world.launch import ends_with_this_process\n"
        "def start():\n"
        "    command = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)']\n"
        "    started.append(subprocess.Popen(ends_with_this_process(command), stdout=subprocess.PIPE))\n"
        "started = []\n"
        "start()\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "for each in started: each.stdout.readline()\n"
        "time.sleep(0.2)\n"
        "print(*[each.pid for each in started if each.poll() is None], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        children = [Process.of(int(pid)) for pid in parent.stdout.readline().split()]
        try:
            assert len(children) == 2
            parent.kill()
            if sys.platform == "linux":
                psutil.wait_procs([found for child in children[:1] if (found := child.find())], timeout=60)
                assert not children[0].find()
        finally:
            end_processes(children)


def test_doctor_names_who_can_be_reached(monkeypatch):
    from dtlib.lab import doctor

    monkeypatch.delenv("OMPI_MCA_btl", raising=False)

    def missing():
        raise DtlibError("there is no C compiler on PATH, such as gcc")

    monkeypatch.setattr(loopback, "library", missing)
    assert doctor._ports() == (
        "other machines can reach mpiexec (there is no C compiler on PATH, such as gcc) while ranks run"
    )
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm,tcp")
    assert "can reach ranks (OMPI_MCA_btl asks for it" in doctor._ports()


@pytest.mark.slow
def test_jupyterlab_and_its_kernels(workshop_folder, monkeypatch):
    """What `dtlib lab` starts asks for a token, which only this user can read, and listens to this machine alone. It
    starts without a package whose import takes seconds."""
    from dtlib.lab import server

    monkeypatch.chdir(workshop_folder)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(workshop_folder / name))
    imported = workshop_folder / "imported"
    with imported.open("w") as said:
        env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
        lab = subprocess.Popen(
            server.command(workshop_folder, False, []), stdout=subprocess.DEVNULL, stderr=said, env=env
        )
    try:
        runtime = workshop_folder / "JUPYTER_RUNTIME_DIR"
        deadline = time.monotonic() + 60
        # The note is written before anybody listens.
        while not (listening(Process.of(lab.pid)) and (told := list(runtime.glob("jpserver-*.json")))):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        note = json.loads(told[0].read_text())
        found = imported.read_text()
        assert " jsonschema._format\n" in found and " rfc3987_syntax.syntax_helpers\n" not in found
        refuses("403", urllib.request.urlopen, f"{note['url']}api/kernels", error=urllib.error.HTTPError, data=b"{}")
        headers = {"Authorization": f"token {note['token']}"}
        asked = urllib.request.Request(f"{note['url']}api/kernels", data=b'{"name": "python3"}', headers=headers)
        kernel = json.load(urllib.request.urlopen(asked))["id"]
        # The server and the kernel's five sockets.
        while len(found := listening(Process.of(lab.pid))) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(found) >= 6 and not outside(found)
        files = [told[0], runtime / f"kernel-{kernel}.json"]
        assert [path.stat().st_mode & 0o077 for path in files] == [0, 0]
    finally:
        end_processes(with_descendants(Process.of(lab.pid)))
        lab.wait()
