"""What torch calls at the end of `import torch`: brings in pipecomm with PIPECOMM_AUTOLOAD=1.

A module of its own because importing the package costs time that nobody asked for.
"""

from __future__ import annotations

import os
import sys

__all__ = ["load"]


def load() -> None:
    """Import pipecomm if PIPECOMM_AUTOLOAD is 1. Never raises: torch's import would fail."""
    value = os.environ.get("PIPECOMM_AUTOLOAD", "")
    if value in ("", "0"):
        return
    try:
        if value != "1":
            raise ValueError(f"expected 0 or 1; got {value!r}")
        import pipecomm  # noqa: F401 - makes its backend known and takes over
    except Exception as error:
        print(f"pipecomm: PIPECOMM_AUTOLOAD has no effect: {error}", file=sys.stderr)
