"""The last line of ``dtlib doctor``: a code that learners send the day before, and what an instructor reads in it.

    dtlib-0.1.0-AB08-1000-1GF7-OK      dtlib-VERSION-DIGITS-OK or -FAILS

The digits are one number in base 32, without letters that look like digits: system, architecture, Python's minor
version, usable cores, GB of memory, one bit a check that failed, and a check sum over all of the code. Nothing in it
names a person, a machine or a folder.
"""

import platform
import re
import sys
import zlib
from dataclasses import dataclass

from dtlib.errors import DtlibError

_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's: no I, L, O and U
_SYSTEMS = ("another system", "Linux", "Darwin", "Windows")
_MACHINES = ("another processor", "x86_64", "arm64", "aarch64")
_BITS = {
    "system": 2,
    "machine": 2,
    "python": 6,
    "cores": 8,
    "memory": 10,
    "failed": 16,
    "check": 16,
}  # the high end first
_FORM = re.compile(r"DTLIB-(\d+(?:\.\d+)*)-((?:[0-9A-Z]+-)+)(OK|FAILS)")


@dataclass(frozen=True)
class Machine:
    """``python`` is the 11 of 3.11; ``memory`` is in GB; cores and memory stop at what the code has room for;
    ``failed`` has a bit for each check of the doctor, the first one lowest."""

    system: int
    machine: int
    python: int
    cores: int
    memory: int
    failed: int

    @property
    def words(self) -> tuple[str, ...]:
        system = f"{_SYSTEMS[self.system]}, {_MACHINES[self.machine]}"
        return system, f"3.{self.python}", str(self.cores), f"{self.memory} GB"


def of_this_machine(failed: int) -> Machine:
    """What the code says of this machine, ``failed`` from the checks."""
    import psutil

    from dtlib.world.machine import usable_cores

    memory = min(round(psutil.virtual_memory().total / 1e9), 2 ** _BITS["memory"] - 1)
    return Machine(
        _number_of(platform.system(), _SYSTEMS), _number_of(platform.machine().replace("AMD64", "x86_64"), _MACHINES),
        sys.version_info.minor, min(usable_cores(), 2 ** _BITS["cores"] - 1), memory, failed,
    )  # fmt: skip


def encoded(machine: Machine, version: str) -> str:
    """The code of a machine with this version of dtlib."""
    number = 0
    for name, bits in _BITS.items():
        number = number << bits | (_sum(machine, version) if name == "check" else getattr(machine, name))
    digits = "".join(_DIGITS[number >> shift & 31] for shift in range(-(-sum(_BITS.values()) // 5) * 5 - 5, -1, -5))
    groups = "-".join(digits[at : at + 4] for at in range(0, len(digits), 4))
    return f"dtlib-{version}-{groups}-{'FAILS' if machine.failed else 'OK'}"


def decoded(code: str) -> tuple[Machine, str]:
    """The machine, and its version of dtlib.

    Raises:
        DtlibError: for what is no code, or was not copied as it was.
    """
    found = _FORM.fullmatch("".join(code.split()).upper())
    if not found:
        raise DtlibError(f"{code!r} is no code of `dtlib doctor`: it looks like dtlib-0.1.0-4G0C-...-OK.")
    digits = found[2].replace("-", "").translate(str.maketrans("OIL", "011"))
    if "U" in digits or len(digits) != -(-sum(_BITS.values()) // 5):
        raise DtlibError(f"{code!r} has letters too many or too few: ask for it once more.")
    number, fields = 0, {}
    for digit in digits:
        number = number << 5 | _DIGITS.index(digit)
    for name, bits in reversed(_BITS.items()):
        fields[name], number = number & (1 << bits) - 1, number >> bits
    check = fields.pop("check")
    machine = Machine(**fields)
    if check != _sum(machine, found[1]) or number or (found[3] == "OK") == bool(machine.failed):
        raise DtlibError(f"{code!r} was not copied as it was, its check sum differs: ask for it once more.")
    return machine, found[1]


def _sum(machine: Machine, version: str) -> int:
    return zlib.crc32(f"{version} {machine}".encode()) & 0xFFFF


def _number_of(name: str, known: tuple[str, ...]) -> int:
    return known.index(name) if name in known else 0


def report(codes: list[str], checks: list[str], version: str) -> str:
    """A row for each code, with the checks that failed, and what to do about codes that cannot be read.

    ``checks`` and ``version`` are those of the dtlib that reads: another one may have other checks.
    """
    from tabulate import tabulate

    rows, problems = [], []
    for code in codes:
        try:
            machine, theirs = decoded(code)
        except DtlibError as problem:
            problems.append(str(problem))
            continue
        failed = [bit for bit in range(_BITS["failed"]) if machine.failed >> bit & 1]
        names = [checks[bit] if theirs == version and bit < len(checks) else f"check {bit + 1}" for bit in failed]
        rows.append((theirs, *machine.words, ", ".join(names) or "nothing"))
    headers = ("dtlib", "system", "Python", "cores", "memory", "would go wrong")
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True) if rows else ""
    others = sorted({row[0] for row in rows} - {version})
    if others:
        problems.append(
            f"Here is dtlib {version}, and of dtlib {', '.join(others)} only the checks' numbers are known."
        )
    return "\n\n".join(filter(None, [table, *problems]))
