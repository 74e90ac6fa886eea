"""Loads the compiled core, once; says what to run where it is missing, broken or out of step."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipecomm._version import __version__
from pipecomm.errors import NotBuiltError

__all__ = ["core", "problem"]

_PACKAGE = Path(__file__).resolve().parent


class _MissingCore:
    """Stands for the core that could not be loaded: every use says why."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuiltError(self._text)


def _load() -> tuple[Any, str | None]:
    try:
        module = importlib.import_module("pipecomm._core")
    except ImportError as error:
        text = _explain(error)
    else:
        built = module.build_info()["version"]
        if built == __version__:
            return module, None
        text = f"pipecomm {__version__} found an extension of version {built}. {_command()}"
    warnings.warn(
        f"{text} Until then schedules can be built, and no more.", RuntimeWarning, stacklevel=2
    )
    return _MissingCore(text), text


def _explain(error: ImportError) -> str:
    wanted = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    found = sorted(path.name for path in _PACKAGE.glob("_core*.so"))
    if wanted in found:
        return f"pipecomm's extension in {_PACKAGE} cannot be loaded: {error}. {_command()}"
    if found:
        return f"pipecomm's extension is {found[0]}; this Python needs {wanted}. {_command()}"
    return f"pipecomm in {_PACKAGE} has no built extension ({wanted}). {_command()}"


def _command() -> str:
    checkout = _PACKAGE.parent
    if (checkout / "CMakeLists.txt").is_file():
        return (
            f"This is the source folder: run '{sys.executable} -m pip install -e {checkout}', "
            "or start Python in another folder to use an installed pipecomm."
        )
    return (
        "Install it again from its sources: "
        f"'{sys.executable} -m pip install --force-reinstall --no-deps FOLDER'."
    )


#: Why the core could not be loaded, or None.
problem: str | None
if TYPE_CHECKING:
    import pipecomm._core as core

    problem = None
else:
    #: The _core module; where it could not be loaded, any use of it raises NotBuiltError.
    core, problem = _load()
