"""One user of a machine who tries what can be tried on others: ``python spy.py UID UID ...``, told to stop by a line.

Prints what succeeded, as JSON. Nothing here needs privileges, and nothing is destroyed that could be.
"""

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import which

import zmq

SHARED = ("/tmp", "/dev/shm", "/var/tmp", "/run")
OF_A_PROCESS = ("environ", "mem", "maps", "io", "fd", "cwd", "root", "exe", "stack")
ASKS = ("/", "/api/kernels", "/api/contents", "/user/ada/api/kernels", "/user/ada/api/contents/course")


def opens(path: str, how: int) -> bool:
    with suppress(OSError):
        os.close(os.open(path, how | os.O_NONBLOCK))
        return True
    return False


def files(victims: set[int]) -> dict[str, list[str]]:
    """Files of theirs in shared places that can be read, and those that can be written."""
    found = {"read": [], "written": []}
    for top in SHARED:
        for folder, names, others in os.walk(top):
            for name in (*names, *others):
                path = os.path.join(folder, name)
                with suppress(OSError):
                    if os.lstat(path).st_uid not in victims or os.path.islink(path):
                        continue
                    found["read"] += [path] * (opens(path, os.O_RDONLY) and not os.path.isdir(path))
                    found["written"] += [path] * (
                        opens(path, os.O_WRONLY) or (os.path.isdir(path) and os.access(path, os.W_OK))
                    )
    return found


def processes(victims: set[int]) -> dict:
    """What of their processes can be looked into or ended, and their command lines, which everybody sees."""
    found = {"of": 0, "looked into": [], "ended": [], "traced": [], "lines": []}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.stat().st_uid not in victims:
                continue
            found["of"] += 1
            found["lines"].append((path / "cmdline").read_text().replace("\0", " "))
            for name in OF_A_PROCESS:
                with suppress(OSError):
                    if name in ("cwd", "root", "exe"):
                        os.readlink(path / name)
                    elif name == "fd":
                        os.listdir(path / name)
                    else:
                        (path / name).read_bytes()
                    found["looked into"].append(f"{path}/{name}")
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(PermissionError):
                    os.kill(int(path.name), number)
                    found["ended"].append(path.name)
            if which("strace") and found["of"] < 4:
                traced = subprocess.run(["timeout", "2", "strace", "-p", path.name], capture_output=True, text=True)
                found["traced"] += [traced.stderr] * ("not permitted" not in traced.stderr)
    return found


def ports(victims: set[int]) -> list[int]:
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[7]) in victims:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def answers(port: int) -> list[str]:
    """What is sent to one who connects: to questions of a browser, and to words that make no sense."""
    found = []
    for ask in [*(f"GET {path} HTTP/1.0\r\n\r\n".encode() for path in ASKS), b"\0" * 64, b"\xff" * 64]:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(0.5)
            connection.sendall(ask)
            found.append(connection.recv(100_000).decode(errors="replace"))
    return found


def unix_sockets(victims: set[int]) -> list[str]:
    """Sockets of theirs that let us in: those with a path, and those in the kernel's own name space."""
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split(maxsplit=7)[7] if len(line.split()) > 7 else ""
        if name.startswith(("@", "/tmp", "/run")):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                if name[0] != "@" and os.lstat(name).st_uid not in victims:
                    continue  # the spy's own would hear of it
                connection.settimeout(0.2)
                connection.connect(name.replace("@", "\0", 1))
                _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                found += [name] * (user in victims)
    return found


def main() -> None:
    victims = set(map(int, sys.argv[1:]))
    listening = ports(victims)
    context, listeners, heard = zmq.Context(), zmq.Poller(), []
    for port in listening:
        for kind in (zmq.SUB, zmq.DEALER):
            listener = context.socket(kind)
            if kind == zmq.SUB:
                listener.subscribe(b"")
            listener.connect(f"tcp://127.0.0.1:{port}")
            listeners.register(listener, zmq.POLLIN)
            if kind == zmq.DEALER:
                listener.send_multipart([b"", b"connection_request"], zmq.NOBLOCK)
    report = {"ports": listening, "sniffs": False}
    with suppress(PermissionError):
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close()
        report["sniffs"] = True
    with ThreadPoolExecutor(16) as together:
        report["http"] = dict(zip(listening, together.map(answers, listening), strict=True))
    print("listens", flush=True)
    until = time.monotonic() + 120
    while not select.select([sys.stdin], [], [], 0)[0] and time.monotonic() < until:
        heard += [re.sub(r"[^ -~]", ".", repr(each.recv_multipart())) for each, _ in listeners.poll(200)]
    report |= {
        "heard": heard,
        "sockets": unix_sockets(victims),
        "files": files(victims),
        "processes": processes(victims),
    }
    context.destroy(0)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
