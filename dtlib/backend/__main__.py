"""``mpiexec -n 4 python -m dtlib.backend train.py ...``: run an unchanged torch program on MPI ranks.

Like torchrun, it sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process, and
registers the backend. The program chooses its backend: ``init_process_group("dtlib")``, or ``"gloo"``.
"""

import os
import runpy
import sys

import dtlib.backend  # noqa: F401, which registers the backend
from dtlib.errors import DtlibError


def main() -> None:
    """Set torch's environment variables, then run the program that the command line names."""
    if len(sys.argv) < 2 or not os.path.exists(sys.argv[1]):
        sys.exit(f"{' '.join(sys.argv[1:2]) or 'No program'}: mpiexec -n RANKS python -m dtlib.backend PROGRAM.py ...")
    from dtlib.backend.process_groups import variables

    try:
        environment = variables()
    except DtlibError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    os.environ.update(environment)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
