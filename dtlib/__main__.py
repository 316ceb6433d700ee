"""``python -m dtlib`` is the ``dtlib`` command."""

import sys


def main() -> int:
    try:  # Ctrl-C may arrive while this still imports
        from dtlib import cli
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
