"""STAlloc's text and MiniMalloc's CSV."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.text_formats import read_minimalloc, read_stalloc


def test_stalloc_lines_are_events() -> None:
    trace = read_stalloc(["1 0x10 512 0", "1 32 1024 5", "", "0 0x10 512 0", "1 16 2048 0"])
    assert trace.ids.tolist() == [16, 32, 16, 16]
    assert trace.nbytes.tolist() == [512, 1024, -1, 2048]
    assert trace.streams.tolist() == [0, 5, 0, 0]


def test_free_of_what_came_before_the_recording_is_left_out() -> None:
    assert read_stalloc(["0 48 512 0", "1 16 512 0"]).ids.tolist() == [16]


@pytest.mark.parametrize(
    "line", ["2 16 512 0", "1 16 512", "1 x 512 0", "1 16 -1 0", "1 99 8 0"], ids=repr
)
def test_stalloc_line_that_makes_no_sense_is_refused_by_number(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_stalloc(["1 99 8 0", line])


def test_minimalloc_buffers_live_from_lower_until_before_upper() -> None:
    trace = read_minimalloc(["id,lower,upper,size", "a,0,2,100", "b,2,3,50", "c,1,3,10"])
    assert list(zip(trace.ids.tolist(), trace.nbytes.tolist(), strict=True)) == [
        *((0, 100), (2, 10), (0, -1), (1, 50), (1, -1), (2, -1))
    ]


def test_minimalloc_columns_come_in_any_order() -> None:
    trace = read_minimalloc(["size,upper,id,lower", "100,2,a,0"])
    assert trace.nbytes.tolist() == [100, -1]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "line 1"),
        (["id,lower,size"], "line 1"),
        (["id,lower,upper,size", "a,0,2"], "line 2"),
        (["id,lower,upper,size", "a,2,2,5"], "line 2: expected lower < upper"),
        (["id,lower,upper,size", "a,0,1,5", "b,0,1,x"], "line 3"),
    ],
)
def test_minimalloc_file_that_makes_no_sense_is_refused(lines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_minimalloc(lines)
