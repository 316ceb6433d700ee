"""Names on the ranks: read their values, and define new ones from the notebook."""

from dtlib.errors import DtlibError
from dtlib.lab.engines.engine_set import current


def values(name: str) -> list:
    """Return the value of ``name`` on each rank, in rank order.

    Raises:
        DtlibError: if a rank does not define it, or if its value does not pickle.
    """
    from ipyparallel.error import CompositeError, RemoteError

    try:
        return current().view.pull(name, block=True)
    except RemoteError as error:
        reason = error.elist[0][1] if isinstance(error, CompositeError) else f"{error.ename}: {error.evalue}"
        raise DtlibError(
            f"{name} cannot be copied from the ranks ({str(reason).splitlines()[0]}). Does a %%px cell define {name} "
            "on all ranks?"
        ) from None


def push(**named: object) -> None:
    """Define names on all ranks: after ``lab.push(file="points.bin")`` the ranks know ``file``."""
    current().view.push(named, block=True)
