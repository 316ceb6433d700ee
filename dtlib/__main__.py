"""``python -m dtlib`` is the ``dtlib`` command."""

import sys

from dtlib.cli import main

sys.exit(main())
