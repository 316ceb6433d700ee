"""``python -m dtlib`` is the ``dtlib`` command."""

import signal
import sys


def main() -> int:
    try:  # Ctrl-C may arrive while this still imports
        from dtlib import cli

        return cli.main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would kill Python while it ends
        return 130


if __name__ == "__main__":
    sys.exit(main())
