"""``python -m dtlib`` is the ``dtlib`` command."""

import signal
import sys


def main() -> int:
    """Run the ``dtlib`` command; return its exit status, 130 after Ctrl-C."""
    # Inside `try`, because Ctrl-C may arrive during the import.
    try:
        from dtlib import cli

        return cli.main()
    except KeyboardInterrupt:
        # A second Ctrl-C would kill Python while it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130


if __name__ == "__main__":
    sys.exit(main())
