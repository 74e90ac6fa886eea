"""The command as one of a shell's pipe: a reader that leaves early is no error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import patient

# More than a pipe holds.
MANY_RANKS = [
    "simulate",
    "--stages",
    "16384",
    "--microbatches",
    "1",
    "--schedule",
    "gpipe",
    "--json",
]


@pytest.mark.parametrize("num_read", [0, 10])
def test_a_reader_that_leaves_ends_it_without_a_word(num_read: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pipecomm", *MANY_RANKS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.read(num_read)
        command.stdout.close()
        told = command.stderr.read()
        # What a shell says of a program that SIGPIPE ended.
        assert command.wait(patient(30)) == 128 + 13
    assert told == b""


def test_a_reader_that_stays_has_all_of_it() -> None:
    command = [sys.executable, "-m", "pipecomm", *MANY_RANKS]
    read = subprocess.run(command, capture_output=True, check=True, timeout=patient(30)).stdout
    assert len(read) > 1 << 16
    assert read.endswith(b"}\n")
