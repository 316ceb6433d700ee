"""Names on the ranks: what they are there, and new ones from the notebook."""

from dtlib.errors import DtlibError
from dtlib.lab.engines.engine_set import current


def values(name: str) -> list:
    """What ``name`` is on each rank, in rank order."""
    from ipyparallel.error import CompositeError, RemoteError

    try:
        return current().view.pull(name, block=True)
    except (CompositeError, RemoteError) as error:
        reason = error.elist[0][1] if isinstance(error, CompositeError) else f"{error.ename}: {error.evalue}"
        raise DtlibError(
            f"{name} cannot be brought here from the ranks ({str(reason).splitlines()[0]}). "
            f"Does a %%px cell define {name} on all ranks?"
        ) from None


def push(**named: object) -> None:
    """Give values to all ranks: ``lab.push(file="points.bin")`` makes the name ``file`` known there."""
    current().view.push(named, block=True)
