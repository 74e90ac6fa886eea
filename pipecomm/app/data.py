"""Bytes to train on: reads text files, holds a part out, draws the same batches on every rank."""

from __future__ import annotations

import os
import stat
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipecomm.errors import ConfigError

__all__ = ["Corpus", "load_corpus", "standard_library"]

# More text than a run on a few cores can look at; keeps a huge --data from filling the memory.
_MAX_NBYTES = 64 << 20
_HELD_OUT_SHARE = 0.1
# Not the interpreter's own sources (installed packages), or not typical of them (test data).
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})
_ADVICE = "give --data a text file, or a folder of text files"


def standard_library() -> Path:
    """Folder of the running interpreter's standard library sources."""
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Corpus:
    """Text as uint8 tensors [num_bytes]; `train` and `held_out` share no byte."""

    train: Tensor
    held_out: Tensor
    description: str

    @property
    def fingerprint(self) -> int:
        """Equal on two ranks if they read the same bytes."""
        return zlib.crc32(self.held_out.numpy().data, zlib.crc32(self.train.numpy().data))

    def batch(self, step: int, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (the next byte), int64 [size, length]; same arguments, same batch."""
        return _draw(self.train, size, length, seed, step)

    def held_out_batch(self, index: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """The index-th batch of the held-out text, int64 [size, length] twice; never changes."""
        return _draw(self.held_out, size, length, 0, index)


def load_corpus(path: Path | None, sequence_length: int) -> Corpus:
    """Read a text file, all text files below a folder, or (None) the standard library's sources.

    Reads at most 64 MiB, files in an order shuffled by their names; the last tenth of the bytes
    is held out.

    Raises:
        ConfigError: nothing there, not readable, empty, or shorter than a sequence needs.
    """
    root = standard_library() if path is None else path
    files = _find_files(root, only_python=path is None)
    text = _read(root, files)
    held_out_nbytes = int(len(text) * _HELD_OUT_SHARE)
    if held_out_nbytes <= sequence_length:
        raise ConfigError(
            f"{root}: expected at least {_needed_nbytes(sequence_length)} bytes of text for"
            f" sequences of {sequence_length}; got {len(text)} bytes in {len(files)} file(s);"
            f" {_ADVICE}, or a smaller --sequence-length"
        )
    cut = len(text) - held_out_nbytes
    name = "standard library sources" if path is None else str(path)
    description = f"{name}: {len(files)} file(s), {len(text) / 1e6:.1f} MB"
    whole = torch.frombuffer(text, dtype=torch.uint8)
    return Corpus(train=whole[:cut], held_out=whole[cut:], description=description)


def _find_files(root: Path, *, only_python: bool) -> list[Path]:
    mode = _mode_of(root)
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{root}: expected a file or a folder; got something else; {_ADVICE}")
    files: list[Path] = []
    skipped = _SKIPPED_FOLDERS if only_python else frozenset()
    for folder, children, names in os.walk(root, onerror=_refuse):
        children[:] = [c for c in children if c not in skipped and not c.startswith(".")]
        files += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and (name.endswith(".py") or not only_python)
        ]
    if not files:
        raise ConfigError(f"{root}: expected text files below this folder; got none; {_ADVICE}")
    return sorted(files, key=lambda file: _name_order(file.relative_to(root)))


def _mode_of(root: Path) -> int:
    try:
        return root.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{root}: cannot be read: {error.strerror}; {_ADVICE}") from error


def _refuse(error: OSError) -> None:
    raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}; {_ADVICE}") from error


def _name_order(relative: Path) -> tuple[int, str]:
    return zlib.crc32(relative.as_posix().encode(errors="surrogateescape")), relative.as_posix()


def _read(root: Path, files: list[Path]) -> bytearray:
    text = bytearray()
    num_binary = 0
    for file in files:
        if not stat.S_ISREG(_mode_of(file)):
            continue
        content = _read_file(file, _MAX_NBYTES - len(text))
        if b"\0" in content[:4096]:
            num_binary += 1
            continue
        text += content
        if len(text) >= _MAX_NBYTES:
            break
    if not text:
        what = f"{num_binary} binary file(s)" if num_binary else "no byte"
        raise ConfigError(f"{root}: expected text; got {what}; {_ADVICE}")
    return text


def _read_file(file: Path, limit: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; {_ADVICE}") from error


def _needed_nbytes(sequence_length: int) -> int:
    return int((sequence_length + 1) / _HELD_OUT_SHARE) + 1


def _draw(text: Tensor, size: int, length: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
    # Neighbouring seeds must not give the same batches one step apart.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].to(torch.int64)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
