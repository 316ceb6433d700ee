"""``python -m benchmarks NAME [--json FILE]``: start the ranks that the benchmark needs and print its table."""

import argparse
import importlib
import json
import pkgutil
import sys
from dataclasses import asdict

import benchmarks
from benchmarks.compare import REPEATS
from dtlib.errors import DtlibError
from dtlib.world.launch import is_rank, run_ranks

OTHERS = ("__main__", "bare_pipeline", "compare", "peers", "input_peers", "gpu_report", "machine_fit", "hub")
NAMES = [
    module.name.replace("_", "-") for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in OTHERS
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--repeats", type=int, help=f"default: {REPEATS}, fewer where each takes long")
    parser.add_argument("--ranks", type=int, help="default: as many as the question needs")
    options = parser.parse_args()
    module = importlib.import_module(f"benchmarks.{options.name.replace('-', '_')}")
    options.repeats = options.repeats or getattr(module, "REPEATS", REPEATS)
    if is_rank():
        return _on_this_rank(module, options)
    try:
        if not module.RANKS:  # it starts ranks itself
            return _show(_told(module.rows(None, options.repeats)), options)
        return run_ranks(["-m", "benchmarks", *sys.argv[1:]], options.ranks or module.RANKS)
    except ModuleNotFoundError as missing:
        parser.exit(2, f"benchmarks: {options.name} needs {missing.name}: run make .venv/tests first.\n")
    except DtlibError as problem:
        parser.exit(2, f"benchmarks: {problem}\n")


def _on_this_rank(module, options) -> int:
    from dtlib.world import init

    world = init()
    rows = _told(module.rows(world, options.repeats), world.rank == 0)
    return _show(rows, options) if world.rank == 0 else 0


def _told(rows, here: bool = True) -> list:
    """All rows; meanwhile a line on stderr for each as soon as it is measured."""
    if here:
        print("measures ...", file=sys.stderr, flush=True)
    found = []
    for row in rows:
        found.append(row)
        if here:
            print(*list(asdict(row).values())[:4], file=sys.stderr, flush=True)
    return found


def _show(rows, options) -> int:
    from tabulate import tabulate

    rows = [asdict(row) for row in rows]
    print(tabulate([{**row, "ratio": f"{row['ratio']:.3g}"} for row in rows], headers="keys", floatfmt=".3g"))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
