"""The command line's arguments: what they are called, what values they take, what they mean."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipecomm._version import __version__

__all__ = ["AUTO_LINK", "parse"]

#: Value of link_mbps that has the bandwidth chosen by measuring.
AUTO_LINK = -1.0

Commands = Mapping[str, Callable[[argparse.Namespace], int]]


class _HelpFormatter(argparse.HelpFormatter):
    """Adds defaults that are values; those that follow from other options say so themselves."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


def parse(argv: Sequence[str] | None, commands: Commands) -> argparse.Namespace:
    """Parse argv (default: sys.argv[1:]); `command` in the result is one of `commands`.

    Wrong arguments, --help and --version end the process through SystemExit, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="pipecomm",
        description="Pipeline-parallel training with small and overlapped transfers.",
        epilog="Exit code: 0 done, 1 failed, 2 wrong use, 3 another rank failed, "
        "128 + n stopped by signal n.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pipecomm {__version__}")
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_train, _add_doctor, _add_simulate, _add_replay):
        add(added, commands)
    return parser.parse_args(argv)


def _add_train(added: Any, commands: Commands) -> None:
    train = added.add_parser(
        "train",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        help="train a byte-level GPT over several processes of this machine",
        description="Trains a byte-level GPT, one stage per process. Starts the processes itself, "
        "or is one of them when started by torchrun.",
    )
    train.set_defaults(command=commands["train"])
    _add_json(train)
    _add_data(train)
    _add_model(train)
    _add_pipeline(train)
    _add_link(train)


def _add_data(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data",
        type=Path,
        help="text file or folder to train on (default: the standard library's sources)",
    )
    train.add_argument("--out", type=Path, default=Path("out"), help="folder for the timelines")
    train.add_argument("--steps", type=_positive_int, default=220, help="training steps")
    train.add_argument("--batch-size", type=_positive_int, default=16, help="sequences per step")
    train.add_argument(
        "--held-out-batches", type=_positive_int, default=16, help="batches of the evaluation"
    )
    train.add_argument("--learning-rate", type=_positive, default=3e-3, help="highest rate")
    train.add_argument("--seed", type=_natural, default=0, help="of weights and batches")


def _add_model(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--layers",
        type=_positive_int,
        help="layers of the whole model (default: 2, or one per stage where there are more)",
    )
    train.add_argument("--width", type=_positive_int, default=128, help="values per position")
    train.add_argument("--heads", type=_positive_int, default=4, help="attention heads")
    train.add_argument("--sequence-length", type=_positive_int, default=128, help="in bytes")


def _add_pipeline(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--stages", type=_positive_int, help="ranks (default: 2; with torchrun, its world size)"
    )
    train.add_argument(
        "--stages-per-rank",
        type=_positive_int,
        default=1,
        help="more than one needs a schedule that has a form for it: interleaved",
    )
    train.add_argument("--microbatches", type=_positive_int, default=8, help="per step")
    train.add_argument("--schedule", default="1f1b", help="how a step is ordered; or auto")
    train.add_argument(
        "--codec", help="for activations; or auto (default: raw; int4 with --compare)"
    )
    train.add_argument(
        "--grad-codec",
        help="for activation gradients, or auto (default: raw; int8 with --compare)",
    )
    train.add_argument(
        "--compare", action="store_true", help="train with raw first, then with the codecs"
    )
    train.add_argument(
        "--timeout-s", type=_positive, default=300.0, help="longest wait for another rank"
    )


def _add_link(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--link-mbps",
        type=_mbps,
        default=0.0,
        help="emulate a link of so many Mbit/s between stages; 'auto' measures and takes one on "
        "which a raw transfer takes twice as long as its compute; 0 = the real path",
    )
    train.add_argument(
        "--link-latency-ms", type=_not_negative, default=0.0, help="emulated delay of the link"
    )
    train.add_argument(
        "--port",
        type=_port,
        help="TCP port where ranks meet, on this machine only (default: a free one)",
    )


def _add_doctor(added: Any, commands: Commands) -> None:
    doctor = added.add_parser(
        "doctor",
        allow_abbrev=False,
        help="tell what was built, what was found, and which path peers would use",
    )
    doctor.add_argument(
        "--attach",
        type=_positive_int,
        metavar="PID",
        help="tell what a running process, of this user, sends and waits for instead",
    )
    doctor.set_defaults(command=commands["doctor"])
    _add_json(doctor)


def _add_simulate(added: Any, commands: Commands) -> None:
    simulate = added.add_parser(
        "simulate",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        help="predict a step of a schedule",
    )
    simulate.set_defaults(command=commands["simulate"])
    _add_json(simulate)
    _add_size(simulate)
    _add_costs(simulate)
    _add_output(simulate)


def _add_size(simulate: argparse.ArgumentParser) -> None:
    order = simulate.add_mutually_exclusive_group()
    order.add_argument("--schedule", default="1f1b", help="how a step is ordered")
    order.add_argument("--csv", type=Path, help="file with the lists of a schedule instead")
    order.add_argument(
        "--compare", action="store_true", help="all schedules side by side, and which one to take"
    )
    simulate.add_argument(
        "--stages", type=_positive_int, help="of the whole model (default: 4; a file's own)"
    )
    simulate.add_argument(
        "--ranks", type=_positive_int, help="(default: as many as the schedule needs)"
    )
    simulate.add_argument(
        "--microbatches", type=_positive_int, help="per step (default: 8; a file's own)"
    )
    simulate.add_argument(
        "--update-every", type=_positive_int, help="microbatches (pipedream-2bw, paci)"
    )
    simulate.add_argument(
        "--max-activations", type=_positive_int, help="microbatches a rank may keep (planned)"
    )
    simulate.add_argument(
        "--memory-limit",
        type=_positive,
        metavar="GIB",
        help="of a rank, for --compare; in microbatches where the costs have no bytes",
    )


def _add_costs(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument(
        "--costs", type=Path, metavar="FILE", help="JSON; the options below come before it"
    )
    for name, what in (
        (
            "forward",
            "one forward pass of a microbatch, or one number per stage: 1,1,1.5 (default: 1)",
        ),
        ("backward", "one backward pass, likewise (default: 2)"),
        ("weight", "the part of it for the weights, likewise (default: half)"),
        ("transfer", "one transfer between neighbours, or one number per link (default: 0)"),
        ("latency", "from leaving a link to arrival, likewise (default: 0)"),
    ):
        simulate.add_argument(f"--{name}-ms", type=_numbers, metavar="MS", help=what)


def _add_output(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a picture (.png, .svg) or a trace for Perfetto (.json)",
    )


def _add_replay(added: Any, commands: Commands) -> None:
    replay = added.add_parser(
        "replay",
        help="what allocators make of a trace of allocations",
        description="What this library's pool, torch's allocator and size classes make of it.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    replay.set_defaults(command=commands["replay"])
    _add_json(replay)
    replay.add_argument(
        "trace",
        metavar="TRACE",
        help="a file (of pipecomm, torch's memory snapshot, STAlloc's text, MiniMalloc's CSV), or "
        "the name of a trace that is made up: 1f1b, 1f1b-recompute, interleaved, "
        "interleaved-recompute, unequal-stages, evaluation",
    )
    replay.add_argument(
        "--plot", metavar="FILE", help="draw memory over time into FILE (.svg, .png)"
    )
    replay.add_argument(
        "--fits",
        type=_positive,
        metavar="GB",
        help="tell whether it would have fitted in GB * 1e9 bytes",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on stdout, all else on stderr"
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of 0 or more; got {text!r}")
    return int(text)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more; got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535; got {text!r}")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more; got {text!r}")
    return value


def _numbers(text: str) -> list[float]:
    return [_not_negative(part) for part in text.split(",")]


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0; got {text!r}")
    return value


def _mbps(text: str) -> float:
    return AUTO_LINK if text == "auto" else _not_negative(text)
