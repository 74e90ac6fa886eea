"""The command line: reads the arguments, calls the command, gives its exit code.

0 done; 1 failed; 2 wrong use; 3 (a rank) another rank failed; 128 + n stopped by signal n, also
141 where nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipecomm import settings
from pipecomm.app.arguments import parse
from pipecomm.errors import ConfigError, PeerLostError, PipecommError, StageFailedError

if TYPE_CHECKING:
    from pipecomm.app.rank import JobRank
    from pipecomm.app.train import TrainOptions

__all__ = ["main"]

_OK, _FAILED, _WRONG_USE, _INTERRUPTED, _NOT_READ = 0, 1, 2, 130, 141
_DEFAULT_STAGES = 2
_DEFAULT_LAYERS = 2
# What --compare sets against raw where no codec is named.
_COMPARED_CODECS = ("int4", "int8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argv (default: sys.argv[1:]) without the program.

    Wrong arguments raise SystemExit(2), as argparse does.
    """
    words = sys.argv[1:] if argv is None else argv
    commands = {"train": _train, "doctor": _doctor, "simulate": _simulate, "replay": _replay}
    args = parse(words, commands)
    args.words = words
    try:
        code = int(args.command(args))
        # Where nobody reads any more, it shows here and not when Python ends.
        sys.stdout.flush()
        return code
    except PipecommError as error:
        code = _WRONG_USE if isinstance(error, ConfigError) else _FAILED
        return _fail(args, str(error), code)
    except KeyboardInterrupt:
        return _fail(args, "interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # As `head` leaves a pipe: nothing is wrong, and nothing can be told there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ


def _fail(args: argparse.Namespace, text: str, code: int) -> int:
    print(f"pipecomm: error: {text}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"error": text, "exit_code": code}), flush=True)
    return code


def _train(args: argparse.Namespace) -> int:
    from pipecomm.app.rank import die_with_launcher, rank_from_environment

    die_with_launcher()
    me = rank_from_environment()
    if me is not None:
        return _train_as_rank(args, me)
    from pipecomm.app.launcher import launch
    from pipecomm.app.report import Report

    options = _train_options(args, _DEFAULT_STAGES)
    options.check()
    _warn_without_pictures()
    report = Report(sys.stdout, sys.stderr, as_json=args.json)
    try:
        outcome = launch(
            _rank_command(args.words), options.stages, port=args.port or 0, on_event=report
        )
    finally:
        report.close()
    if outcome.exit_code:
        return _fail(args, outcome.text, outcome.exit_code)
    return _OK


def _train_as_rank(args: argparse.Namespace, me: JobRank) -> int:
    """Never returns after an error: a lost peer can leave threads that do not end."""
    from pipecomm.app.rank import EXIT_OTHER_RANK
    from pipecomm.outcome import report_end

    try:
        _run_rank(args, me)
    except Exception as error:
        report_end(error)
        code = _WRONG_USE if isinstance(error, ConfigError) else _FAILED
        if isinstance(error, (PeerLostError, StageFailedError)):
            code = EXIT_OTHER_RANK
        _leave(me, str(error) if isinstance(error, PipecommError) else traceback.format_exc(), code)
    return _OK


def _leave(me: JobRank, text: str, code: int) -> None:
    # The launcher puts the rank in front itself.
    prefix = "" if settings.EVENT_FD.text() else f"[rank {me.rank}] "
    print(f"{prefix}pipecomm: error: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _run_rank(args: argparse.Namespace, me: JobRank) -> None:
    from pipecomm.app.rank import claim_stdout
    from pipecomm.app.report import Report
    from pipecomm.outcome import event_pipe

    stdout = claim_stdout()
    options = _train_options(args, me.size)
    if options.stages != me.size:
        raise ConfigError(
            f"--stages: expected as many as there are ranks, {me.size}; got {options.stages}; "
            f"start {options.stages} ranks, or leave --stages out"
        )
    options.check()
    report = event_pipe()
    if report is not None:
        _join_and_train(options, me, report)
        return
    shown = Report(stdout, sys.stderr, as_json=args.json)
    try:
        _join_and_train(options, me, shown)
    finally:
        shown.close()


def _join_and_train(
    options: TrainOptions, me: JobRank, report: Callable[[dict[str, Any]], None]
) -> None:
    import torch
    import torch.distributed as dist

    from pipecomm.app.train import train

    torch.set_num_threads(settings.OMP_NUM_THREADS.value())
    dist.init_process_group("pipecomm", timeout=timedelta(seconds=options.timeout_s))
    train(options, me, report)
    dist.destroy_process_group()


def _rank_command(argv: Sequence[str]) -> list[str]:
    """This command for a rank, importing what this process imports wherever it was started."""
    run = "from pipecomm.app.cli import main; sys.exit(main())"
    code = f"import sys; sys.path[:] = {sys.path!r}; {run}"
    return [sys.executable, "-c", code, *argv]


def _train_options(args: argparse.Namespace, default_stages: int) -> TrainOptions:
    from pipecomm.app.train import TrainOptions

    values = {f.name: getattr(args, f.name) for f in fields(TrainOptions)}
    defaults = _COMPARED_CODECS if args.compare else ("raw", "raw")
    if args.stages is None:
        values["stages"] = default_stages
    if args.layers is None:
        values["layers"] = max(_DEFAULT_LAYERS, values["stages"] * args.stages_per_rank)
    for name, default in zip(("codec", "grad_codec"), defaults, strict=True):
        if values[name] is None:
            values[name] = default
    return TrainOptions(**values)


def _warn_without_pictures() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print(
            "pipecomm: matplotlib is not installed: there will be a trace, but no picture of it "
            "(pip install matplotlib)",
            file=sys.stderr,
        )


def _replay(args: argparse.Namespace) -> int:
    from pipecomm.app.replay import run

    return run(args.trace, as_json=args.json, plot=args.plot, fits_gb=args.fits)


def _doctor(args: argparse.Namespace) -> int:
    if args.attach is not None:
        return _attach(args)
    from pipecomm.app.doctor import examine, format_findings

    findings = examine()
    print(json.dumps(findings) if args.json else format_findings(findings), flush=True)
    return _OK


def _attach(args: argparse.Namespace) -> int:
    from pipecomm._native import core

    report = core.hang_report(args.attach)
    print(json.dumps({"pid": args.attach, "report": report}) if args.json else report, flush=True)
    return _OK


def _simulate(args: argparse.Namespace) -> int:
    from pipecomm.app.simulate import simulate

    return simulate(args)
