"""How long a test waits before it calls something hung: as long as this machine, now, needs.

The limits in the tests are for an idle machine with two processors. What has a limit of its own to
keep (a loss that is told within 2 s) does not come here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

__all__ = ["measure_once", "patient"]

_VARIABLE = "PIPECOMM_TEST_SLOWNESS"
# What the import of torch takes on the machine that the limits are for.
_REFERENCE_S = 1.6


def measure_once() -> None:
    """Time a known piece of work; every process started from here on has the result."""
    if _VARIABLE in os.environ:
        return
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    os.environ[_VARIABLE] = str((time.monotonic() - started) / _REFERENCE_S)


def patient(limit_s: float) -> float:
    """The limit, in seconds: longer on a slow machine, and on one that more processes want."""
    slowness = float(os.environ.get(_VARIABLE, "1"))
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return limit_s * max(1.0, slowness, load)
