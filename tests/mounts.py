"""Commands that see another file system in a folder, in a mount namespace of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["in_read_only", "on_noexec", "why_impossible"]


def why_impossible() -> str:
    """Why nothing can be mounted here; empty where it can."""
    if shutil.which("unshare") is None:
        return "needs unshare"
    made = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True
    )
    return made.stderr.strip()


def on_noexec(*folders: Path) -> list[str | Path]:
    """Start of a command for which the folders are empty and mounted noexec."""
    return _mounted('mount -t tmpfs -o noexec tmpfs "$1"', *folders)


def in_read_only(*folders: Path) -> list[str | Path]:
    """Start of a command that cannot write into the folders, whoever it runs as."""
    return _mounted('mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"', *folders)


def _mounted(mount: str, *folders: Path) -> list[str | Path]:
    script = f'while [ "$1" != -- ]; do {mount} && shift || exit; done; shift; exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh", *folders, "--"]
