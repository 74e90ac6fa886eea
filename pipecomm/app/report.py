"""Shows a training: progress on stderr, then one table, or one JSON document, on stdout."""

from __future__ import annotations

import json
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from pipecomm.codecs.policy import AUTO
from pipecomm.outcome import Event

__all__ = ["Report"]

# Without a terminal a line from time to time replaces the bar.
_NUM_PLAIN_LINES = 10
_MIN_TABLE_WIDTH = 100
# Columns of a terminal that are taken by what stands around the bar.
_BAR_TEXT_WIDTH = 75


class Report:
    """Call it with each event, in order; close it at the end, also when none came."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, as_json: bool) -> None:
        self._stdout = stdout
        self._as_json = as_json
        self._console = Console(file=stderr, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._num_steps = 0
        self._note = ""

    def __call__(self, event: Event) -> None:
        {"start": self._start, "step": self._step, "result": self._result}[event["event"]](event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, event: Event) -> None:
        self._num_steps = event["num_steps"]
        self._note = " (emulated)" if event["link"]["is_emulated"] else ""
        self._console.print(f"{event['data']}; {event['link']['text']}", markup=False)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=min(40, max(6, self._console.width - _BAR_TEXT_WIDTH))),
                TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
                console=self._console,
            )
            self._progress.start()

    def _step(self, event: Event) -> None:
        text = (
            f"loss {event['loss']:.3f} {event['tokens_per_s']:,.0f} tokens/s "
            f"{event['wire_nbytes'] / 1e6:.1f} MB on wire{self._note}"
        )
        if self._progress is not None:
            self._advance(event, text)
        elif event["step"] == 1 or event["step"] % max(1, self._num_steps // _NUM_PLAIN_LINES) == 0:
            place = f"step {event['step']}/{self._num_steps}"
            self._console.print(f"{event['run']}: {place} {text}", markup=False)

    def _advance(self, event: Event, text: str) -> None:
        assert self._progress is not None
        if event["run"] not in self._tasks:
            task = self._progress.add_task(event["run"], total=self._num_steps, text="")
            self._tasks[event["run"]] = task
        self._progress.update(self._tasks[event["run"]], completed=event["step"], text=text)

    def _result(self, event: Event) -> None:
        self.close()
        document = {key: value for key, value in event.items() if key != "event"}
        if len(document["runs"]) == 2:
            document["compared"] = _compare(*document["runs"])
        if self._as_json:
            print(json.dumps(document), file=self._stdout, flush=True)
            return
        console = Console(file=self._stdout, highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, _MIN_TABLE_WIDTH)
        console.print(_table(document))
        for run in document["runs"]:
            print(f"{run['name']}, last step: {run['last_step']['text']}", file=self._stdout)
            if AUTO in (run["codec"], run["grad_codec"]):
                print(_in_use(run), file=self._stdout, flush=True)
            for file in run["files"]:
                print(f"wrote {file}", file=self._stdout, flush=True)


def _in_use(run: dict[str, Any]) -> str:
    """What "auto" took, as `Pipeline` takes it to have the same again."""
    return f"{run['name']} took codec={run['codecs']}, grad_codec={run['grad_codecs']}"


def _compare(raw: dict[str, Any], chosen: dict[str, Any]) -> dict[str, float]:
    """The second run against the first: losses as relative difference, the rest as ratio."""
    return {
        "train_loss_change": chosen["train_loss"] / raw["train_loss"] - 1,
        "held_out_loss_change": chosen["held_out_loss"] / raw["held_out_loss"] - 1,
        "step_speedup": raw["step_s"] / chosen["step_s"],
        "wire_nbytes_ratio": _ratio(chosen["wire_nbytes_sent"], raw["wire_nbytes_sent"]),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _table(document: dict[str, Any]) -> Table:
    runs = document["runs"]
    compared = document.get("compared")
    table = Table(
        title=f"{document['num_steps']} steps, {document['link']['text']}", title_style=""
    )
    table.add_column("")
    for run in runs:
        table.add_column(run["name"], justify="right")
    if compared:
        table.add_column("compared", justify="right")
    for name, values, verdict in _rows(runs, compared or {}):
        table.add_row(name, *values, *([verdict] if compared else []))
    return table


def _rows(
    runs: list[dict[str, Any]], compared: dict[str, float]
) -> list[tuple[str, list[str], str]]:
    def row(name: str, key: str, pattern: str, scale: float = 1, verdict: str = "") -> Any:
        values = [pattern.format(run[key] * scale) for run in runs]
        return name, values, verdict.format(**compared) if compared else ""

    ratio = [f"{_ratio(run['payload_nbytes_sent'], run['wire_nbytes_sent']):.2f} x" for run in runs]
    return [
        row("loss at the first step (nats/byte)", "first_loss", "{:.3f}"),
        row("loss, train", "train_loss", "{:.3f}", verdict="{train_loss_change:+.2%}"),
        row("loss, held-out", "held_out_loss", "{:.3f}", verdict="{held_out_loss_change:+.2%}"),
        row("step time (ms)", "step_s", "{:.1f}", 1e3, "{step_speedup:.2f} x faster"),
        row("tokens/s", "tokens_per_s", "{:,.0f}"),
        row("bubble", "bubble", "{:.1%}"),
        row("exposed communication (ms/step)", "exposed_comm_s", "{:.1f}", 1e3),
        row("bytes sent (MB)", "wire_nbytes_sent", "{:.1f}", 1e-6, "{wire_nbytes_ratio:.1%}"),
        ("compression ratio", ratio, ""),
    ]
