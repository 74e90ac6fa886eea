"""`python -m pipecomm` is the command line."""

from __future__ import annotations

import sys

from pipecomm.app.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
