"""The last line of ``dtlib doctor``: a code that learners send to the instructor before the course.

    dtlib-0.1.0-1-1-11-2-8-0-C1E7-OK      dtlib-VERSION-NUMBERS-SUM-OK or -FAILS

The numbers are the fields of ``Machine``. The sum covers the whole code: half of zlib's CRC-32, in hexadecimal. The
code names no person, machine or folder.
"""

import platform
import re
import sys
import zlib
from dataclasses import astuple, dataclass

from dtlib.errors import DtlibError

_SYSTEMS = ("another system", "Linux", "Darwin", "Windows")
_MACHINES = ("another processor", "x86_64", "arm64", "aarch64")
_FORM = re.compile(r"DTLIB-(\d+(?:\.\d+)*)-((?:[\dOIL]{1,6}-){6}[\dA-FOIL]{4})-(OK|FAILS)")


@dataclass(frozen=True)
class Machine:
    """The facts about a machine in a code.

    ``system`` and ``machine`` are indices into the tables above, ``python`` is the 11 of 3.11, ``memory`` is in GB.
    ``failed`` has one bit for each check of the doctor; the lowest bit is the first check.
    """

    system: int
    machine: int
    python: int
    cores: int
    memory: int
    failed: int

    @property
    def words(self) -> tuple[str, ...]:
        """System, Python version, cores and memory, as text."""
        system = f"{_SYSTEMS[self.system]}, {_MACHINES[self.machine]}"
        return system, f"3.{self.python}", str(self.cores), f"{self.memory} GB"


def of_this_machine(failed: int) -> Machine:
    """Return the facts about this machine; ``failed`` has the bits of the failed checks."""
    import psutil

    from dtlib.world.machine import usable_cores

    memory = round(psutil.virtual_memory().total / 1e9)
    return Machine(
        _number_of(platform.system(), _SYSTEMS), _number_of(platform.machine().replace("AMD64", "x86_64"), _MACHINES),
        sys.version_info.minor, usable_cores(), memory, failed,
    )  # fmt: skip


def encoded(machine: Machine, version: str) -> str:
    """Return the code of a machine with this version of dtlib."""
    numbers = "-".join(map(str, astuple(machine)))
    return f"dtlib-{version}-{numbers}-{_sum(machine, version):04X}-{'FAILS' if machine.failed else 'OK'}"


def decoded(code: str) -> tuple[Machine, str]:
    """Return the machine in a code, and its version of dtlib.

    Raises:
        DtlibError: if this is no code, or if its checksum differs.
    """
    found = _FORM.fullmatch("".join(code.split()).upper())
    if not found:
        raise DtlibError(f"{code!r} is no code of `dtlib doctor`: it looks like dtlib-0.1.0-1-1-11-...-OK.")
    *numbers, check = found[2].translate(str.maketrans("OIL", "011")).split("-")
    machine = Machine(*map(int, numbers))
    if int(check, 16) != _sum(machine, found[1]) or (found[3] == "OK") == bool(machine.failed):
        raise DtlibError(f"{code!r} has a wrong check sum, so it was not copied exactly: ask the learner for it again.")
    return machine, found[1]


def _sum(machine: Machine, version: str) -> int:
    return zlib.crc32(f"{version} {machine}".encode()) & 0xFFFF


def _number_of(name: str, known: tuple[str, ...]) -> int:
    return known.index(name) if name in known else 0


def report(codes: list[str], checks: list[str], version: str) -> str:
    """Return a table with one row per code and the failed checks, followed by messages about unreadable codes.

    ``checks`` and ``version`` belong to the dtlib that reads the codes; another version may have other checks.
    """
    from tabulate import tabulate

    rows, problems = [], []
    for code in codes:
        try:
            machine, theirs = decoded(code)
        except DtlibError as problem:
            problems.append(str(problem))
            continue
        failed = [bit for bit in range(machine.failed.bit_length()) if machine.failed >> bit & 1]
        names = [checks[bit] if theirs == version and bit < len(checks) else f"check {bit + 1}" for bit in failed]
        rows.append((theirs, *machine.words, ", ".join(names) or "nothing"))
    headers = ("dtlib", "system", "Python", "cores", "memory", "would go wrong")
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True) if rows else ""
    others = sorted({row[0] for row in rows} - {version})
    if others:
        problems.append(
            f"This is dtlib {version}; for dtlib {', '.join(others)} only the numbers of the checks are known."
        )
    return "\n\n".join(filter(None, [table, *problems]))
