"""``python -m megacore`` is the ``megacore`` command."""

from __future__ import annotations

import sys

from megatrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
