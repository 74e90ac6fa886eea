"""README and docs: code runs as written, commands exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from pipecomm.app.arguments import parse
from tests.ranks import spawn_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a reader has at hand where a page shows a piece of a program.
BEFORE = {
    "engine.md": """
import math, torch, pipecomm
stage = torch.nn.Linear(4, 4)
loss_fn = torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
loader = [(torch.randn(8, 4), torch.randn(8, 4))]
inputs, labels = torch.randn(8, 4), torch.randint(4, (8,))
pipeline = pipecomm.Pipeline(stage, loss_fn=loss_fn)
def summed_cross_entropy(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="sum")
""",
}
COMMANDS = {name: lambda _: 0 for name in ("train", "doctor", "simulate", "replay")}


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def _python_blocks() -> list[tuple[str, int]]:
    found = [(page.name, i) for page in PAGES for i, _ in enumerate(_blocks(page, "python"))]
    # schedules.md is a doctest, run by test_schedule.py.
    return [item for item in found if item[0] != "schedules.md"]


@pytest.mark.parametrize(("name", "index"), _python_blocks())
def test_python_block_runs_as_written(name: str, index: int, tmp_path: Path) -> None:
    page = next(page for page in PAGES if page.name == name)
    block = _blocks(page, "python")[index]
    script = tmp_path / "block.py"
    script.write_text(f"{BEFORE.get(name, '')}\n{block}")
    if "init_process_group" in block and name != "README.md":
        _run_as_ranks(script, 2 if "[0, 1]" in block else 1)
        return
    _run_as_ranks(script, 1 if "init_process_group" in block else 0)


def test_readme_pipeline_runs_on_two_ranks_too(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(_blocks(ROOT / "README.md", "python")[0])
    outputs = _run_as_ranks(script, 2)
    assert outputs[0].strip() == "None"
    assert float(outputs[1]) > 0


def _run_as_ranks(script: Path, size: int) -> list[str]:
    """Run the script on `size` ranks as torchrun does; 0: without any such environment."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if size else None
    return spawn_ranks(max(size, 1), _run_as_rank, str(script), port, timeout_s=100)


def _run_as_rank(rank: int, size: int, _: str, script: str, port: int | None) -> str:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if port is not None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


def _command_lines() -> list[str]:
    lines = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh)?\n(.*?)```", page.read_text(), re.DOTALL):
            lines += [
                line.split("#")[0].strip()
                for line in block.splitlines()
                if re.match(r"(pipecomm|make|torchrun) ", line)
            ]
    return sorted(set(lines))


@pytest.mark.parametrize("line", _command_lines())
def test_command_of_the_docs_is_understood(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "torchrun":
        words = words[words.index("pipecomm") :] if "pipecomm" in words else []
    if words:
        parse(words[1:], COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_limit_of_the_engine_names_a_test_that_tries_it() -> None:
    limits = (ROOT / "docs" / "engine.md").read_text().split("## Limits")[1].split("\n## ")[0]
    rows = [line for line in limits.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row.split("|")[3]) for row in rows]
    assert len(named) > 10
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for names, row in zip(named, rows, strict=True):
        assert len(names) == 1, row
        assert re.search(rf"^def {names[0]}\(", sources, re.MULTILINE), names[0]


def test_every_page_is_listed_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme


def test_readme_names_every_folder_of_the_sources() -> None:
    readme = (ROOT / "README.md").read_text()
    for folder in (ROOT / "csrc").iterdir():
        if folder.is_dir():
            assert f"csrc/{folder.name}" in readme


def test_changelog_names_the_current_state() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
