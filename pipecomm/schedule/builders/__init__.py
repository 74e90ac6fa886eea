"""The schedules known by name: one file each, with its picture, and the registry over them."""

from __future__ import annotations

from pipecomm.schedule.builders.registry import build, known_schedules

__all__ = ["build", "known_schedules"]
