"""Environment variables: their values, the error of a wrong one, and the page that lists them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomm import BackendOptions, Codec, CodecPolicy, settings
from pipecomm.errors import ConfigError
from pipecomm.links.link import Links
from pipecomm.settings import ALL, Setting
from tests import source_files as source

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
NUMBERS = [item for item in ALL.values() if isinstance(item.default, int)]


def rows(heading: str) -> dict[str, list[str]]:
    """Variable -> the other cells of its row, in the table below a heading of the page."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {name.strip("`"): rest for name, *rest in cells[1:]}


def shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(int(default))
    return str(default) if default not in ("", ()) else ""


@pytest.mark.parametrize("item", ALL.values(), ids=lambda item: item.name)
def test_default_holds_where_it_is_not_set_or_empty(
    item: Setting[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(item.name, raising=False)
    assert (item.text(), item.value()) == (None, item.default)
    monkeypatch.setenv(item.name, "")
    assert (item.text(), item.value()) == (None, item.default)


@pytest.mark.parametrize("item", ALL.values(), ids=lambda item: item.name)
def test_value_has_the_type_of_the_default(
    item: Setting[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(item.name, "1")
    assert item.text() == "1"
    assert type(item.value()) is type(item.default)
    assert item.value() in (1, "1", ("1",))


@pytest.mark.parametrize("text", ["yes", "-1", "1.5", "1 2"])
@pytest.mark.parametrize("item", NUMBERS, ids=lambda item: item.name)
def test_wrong_value_is_refused_with_variable_and_text(
    item: Setting[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(item.name, text)
    with pytest.raises(ConfigError) as caught:
        item.value()
    assert str(caught.value) == f"expected {item.expected} in {item.name}; got {text!r}"


def test_flag_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_STRICT", "0")
    assert settings.STRICT.value() is False
    monkeypatch.setenv("PIPECOMM_STRICT", "2")
    with pytest.raises(ConfigError, match="expected 0 or 1 in PIPECOMM_STRICT; got '2'"):
        settings.STRICT.value()


def test_interfaces_are_names_without_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_SOCKET_IFNAME", "eth0,,eth1,")
    assert settings.SOCKET_IFNAME.value() == ("eth0", "eth1")


def test_environment_for_another_process_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_STRICT", "1")
    copied = settings.environment()
    copied["PIPECOMM_STRICT"] = "0"
    assert settings.STRICT.value() is True


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        settings.STRICT.default = True  # type: ignore[misc]


def test_names_are_told_apart() -> None:
    found = [item for item in vars(settings).values() if isinstance(item, Setting)]
    assert len(found) == len(ALL) > 20


def test_page_lists_what_python_reads_as_it_is() -> None:
    expected = {
        name: [
            item.expected,
            f"`{shown(item.default)}`" if shown(item.default) else "",
            item.meaning,
        ]
        for name, item in ALL.items()
    }
    assert rows("Read by Python") == expected


def test_page_lists_what_cpp_reads() -> None:
    files = source.source_files(ROOT, ("csrc",), source.CPP_SUFFIXES)
    read = {name for path in files for name in source.cpp_variables(path)}
    assert read
    assert rows("Read by C++").keys() == read


def test_reads_in_cpp_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text('f(std::getenv("ONE"), getenv( "TWO"));  // getenv("THREE")\n')
    assert source.cpp_variables(path) == {"ONE", "TWO"}


def test_engine_links_and_backend_code_from_one_size_on() -> None:
    default = settings.MIN_NBYTES.default
    sends = inspect.signature(Links.send).parameters["min_nbytes"]
    covers = inspect.signature(Codec.covers).parameters["min_nbytes"]
    assert CodecPolicy("int8").min_nbytes == BackendOptions().min_nbytes == default
    assert sends.default == covers.default == default
    assert Codec("int8").covers(torch.zeros(default // 4))
    assert not Codec("int8").covers(torch.zeros(default // 4 - 1))
