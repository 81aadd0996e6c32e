"""`python -m trainer --config FILE [--SECTION.KEY VALUE …] [--result out.json]`, once per rank under torchrun."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import NoReturn

from bagpipe.config.load import Option, parse_config
from bagpipe.distributed.error_line import print_once
from bagpipe.distributed.launcher import follow_launcher
from bagpipe.distributed.membership import Membership
from bagpipe.errors import EXIT_DONE, EXIT_INTERRUPTED
from bagpipe.util.environment import check_environment
from bagpipe.util.printing import print_text
from bagpipe.util.program import exiting, printed_warnings
from bagpipe.util.programs import command_of
from trainer.process import configure_device, configure_process

__all__ = ["main"]


#: Importing torchrec makes torch.fx log a deprecation note that users cannot act on.
_TRACING_LOGGER = "torch.fx._symbolic_trace"

#: Module of this package and function of each subcommand; without one the program trains.
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "apply": (".export", "apply"),
    "eval": (".scoring", "evaluate"),
    "export": (".export", "export"),
    "predict": (".scoring", "predict"),
    "rows": (".rows", "rows"),
}


def main(argv: Sequence[str]) -> NoReturn:
    """Run the program and exit with its code.

    Args:
        argv: arguments without the program's name.
    """
    with exiting():
        membership = Membership.from_environment()
    with exiting() if membership is None else exiting(partial(_print_once, membership)), printed_warnings():
        if argv and argv[0] in _COMMANDS:
            sys.exit(_run_command(*_COMMANDS[argv[0]], argv[1:]))
        options = (Option(flag="--result", help="write the result as one JSON object"),)
        command_line = parse_config(argv, command_of("train"), options)
        config = command_line.config
        # Runs before torchrec is imported: with wrong package versions that import fails with an unreadable error.
        check_environment(config.run.device)
        # During training both signals request a clean stop (`StopOnSignals`). Before and after, they unwind the stack.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _exit_interrupted)
        logging.getLogger(_TRACING_LOGGER).addFilter(_is_no_tracing_note)
        configure_process()
        configure_device(config.run.device, 1 if membership is None else membership.world_size)
        if membership is None:
            follow_launcher()
        from trainer.job import run_job

        result = run_job(config, membership=membership, result_path=command_line.options["result"])
        if (membership is None or membership.rank == 0) and config.run.log_format == "text":
            print_text("\n".join(result.lines()))
        sys.exit(EXIT_INTERRUPTED if result.stopped else EXIT_DONE)


def _print_once(membership: Membership, error: BaseException, write: Callable[[BaseException], None]) -> None:
    # The launcher signals the ranks that are left when one has ended. They still have to find out who prints.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print_once(membership, error, write)


def _run_command(module: str, function: str, argv: Sequence[str]) -> int:
    """Run a subcommand. Returns its exit code."""
    check_environment("cpu")
    logging.getLogger(_TRACING_LOGGER).addFilter(_is_no_tracing_note)
    configure_process()
    code: int = getattr(import_module(module, __package__), function)(argv)
    return code


def _is_no_tracing_note(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("is_fx_tracing will return true")


def _exit_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit. A KeyboardInterrupt that passes through C code makes CPython ignore the exit code."""
    raise SystemExit(EXIT_INTERRUPTED)
