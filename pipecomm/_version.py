"""The version; pyproject.toml and CMakeLists.txt read this file's text."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
