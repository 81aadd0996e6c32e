"""`python -m cacher --config FILE --listen unix:PATH|HOST:PORT [--SECTION.KEY VALUE …]`: the daemon's process.

    flags and file ─> open data (not with --plan-only) ─> start shards ─> listen ─> serve … SIGTERM, SIGINT: drain
                           └──────────────────────────────────┴─ SIGTERM, SIGINT: end the shards          ─> exit 0
                                                                                          second signal: exit now

An embedded daemon (`embedded`) writes its address or an error to `--ready-fd`, and exits when its standard input
closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from types import FrameType
from typing import TextIO

from bagpipe.client.address import Address, parse_address
from bagpipe.client.agreement import settings_of
from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import Config
from bagpipe.errors import EXIT_DONE, EXIT_INPUT, InputError
from bagpipe.util.program import run_program
from bagpipe.util.programs import command_of
from bagpipe.util.secret_files import CACHER_SECRET, read_secret
from cacher.logs import LEVELS, STREAMS, start_logging
from cacher.planning import PlannedData
from cacher.process import configure_process
from cacher.security import MIN_SECRET_CHARACTERS, Access
from cacher.server import CacherServer, Limits
from cacher.shards import Shards

__all__ = ["main"]

_LOG = logging.getLogger("cacher")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_OPTIONS = (
    Option(flag="--listen", help="address to listen on", metavar="unix:PATH|HOST:PORT"),
    Option(
        flag="--metrics", help="address of Prometheus metrics, /healthz and /readyz; empty: none", metavar="HOST:PORT"
    ),
    Option(flag="--secret-file", help=f"file with the secret shared with trainers; without one: ${CACHER_SECRET}"),
    Option(flag="--tls-cert", help="the listener's certificate (PEM)"),
    Option(flag="--tls-key", help="its private key (PEM)"),
    Option(flag="--tls-client-ca", help="certificate authority of the trainers (PEM); others are refused"),
    Option(flag="--plan-only", help="open no data: only plan for jobs that bring their own batches", is_switch=True),
    Option(
        flag="--plan-gib", help="memory of each planner of such a job, its window included", metavar="GIB", default="32"
    ),
    Option(flag="--max-jobs", help="most concurrent jobs", metavar="N", default="8"),
    Option(flag="--grace-s", help="how long to wait for a lost rank", metavar="S", default="120"),
    Option(flag="--hello-timeout-s", help="longest silence of a new connection", metavar="S", default="10"),
    Option(
        flag="--start-timeout-s",
        help="a job that asks for nothing so long makes room for another",
        metavar="S",
        default="600",
    ),
    Option(flag="--drain-timeout-s", help="how long jobs can go on after SIGTERM", metavar="S", default="3600"),
    Option(flag="--log-level", help=f"one of {', '.join(LEVELS)}", metavar="LEVEL", default="info"),
    Option(flag="--log-to", help=f"one of {', '.join(STREAMS)}", metavar="STREAM", default="stderr"),
    Option(flag="--ready-fd", help="write the address to this descriptor; end with standard input", metavar="FD"),
)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    return run_program(_cacher, argv)


def _cacher(argv: Sequence[str]) -> int:
    command_line = parse_config(argv, command_of("cacher"), _OPTIONS)
    config, options = command_line.config, command_line.options
    ready = options["ready-fd"]
    if not ready:
        return _run(config, options, None)
    with os.fdopen(int(ready), "w") as parent:
        try:
            return _run(config, options, parent)
        except InputError as error:
            # Only the parent reports the error.
            _tell(parent, {"error": str(error)})
            return EXIT_INPUT


def _run(config: Config, options: Mapping[str, str], parent: TextIO | None) -> int:
    if not options["listen"]:
        raise InputError("--listen is needed: unix:PATH or HOST:PORT")
    if options["log-level"] not in LEVELS:
        raise InputError(f"--log-level must be one of {', '.join(LEVELS)}, got {options['log-level']!r}")
    if options["log-to"] not in STREAMS:
        raise InputError(f"--log-to must be one of {', '.join(STREAMS)}, got {options['log-to']!r}")
    listen = parse_address(options["listen"], subject="--listen")
    metrics = parse_address(options["metrics"], subject="--metrics") if options["metrics"] else None
    if metrics is not None and metrics.path:
        raise InputError(f"--metrics must be HOST:PORT, got {options['metrics']!r}")
    access = Access(
        secret=read_secret(
            options["secret-file"], subject="--secret-file", variable=CACHER_SECRET, least=MIN_SECRET_CHARACTERS
        ),
        tls_cert=options["tls-cert"],
        tls_key=options["tls-key"],
        tls_client_ca=options["tls-client-ca"],
    )
    limits = Limits(
        max_jobs=int(_positive(options, "max-jobs")),
        plan_bytes=round(_positive(options, "plan-gib") * 2**30),
        grace_s=_positive(options, "grace-s"),
        hello_timeout_s=_positive(options, "hello-timeout-s"),
        start_timeout_s=_positive(options, "start-timeout-s"),
        drain_timeout_s=_positive(options, "drain-timeout-s"),
    )
    start_logging(options["log-level"], options["log-to"])
    configure_process()
    if options["plan-only"] and config.cacher.shards:
        raise InputError(
            f"--plan-only opens no data, so cacher.shards must be empty, got {' '.join(config.cacher.shards)}"
        )
    with _ending_at_signals(), ExitStack() as opened:
        data = None if options["plan-only"] else PlannedData(config.data, config.run.seed, config.checkpoint.dir)
        if data is not None and config.cacher.shards:
            shards = Shards(config, data.schema, data.identity, data.ids_by_feature())
            data.shards = opened.enter_context(shards)
        server = CacherServer(data, settings_of(config), listen, access=access, limits=limits)
        asyncio.run(_serve(server, metrics, parent))
    return EXIT_DONE


class _Signalled(SystemExit):
    """A signal before the event loop handles signals."""

    def __init__(self, number: int) -> None:
        super().__init__(EXIT_DONE)
        self.name = signal.Signals(number).name


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """Until the event loop takes the signals over, the first one leaves the block; the second ends the process."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise _Signalled(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            signal.signal(number, leave)
        yield
    except _Signalled as ended:
        _LOG.info("signal", extra={"signal": ended.name, "at_once": False})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(parent: TextIO, message: Mapping[str, str]) -> None:
    """Write to the parent, if it is still there; the end of standard input ends this process, too."""
    with suppress(BrokenPipeError):
        parent.write(json.dumps(message))
        parent.close()


async def _serve(server: CacherServer, metrics: Address | None, parent: TextIO | None) -> None:
    loop = asyncio.get_running_loop()
    leave, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        (hurry if leave.is_set() else leave).set()
        _LOG.info("signal", extra={"signal": signal.Signals(number).name, "at_once": hurry.is_set()})

    def on_parent_gone() -> None:
        loop.remove_reader(sys.stdin.fileno())  # the end of a pipe stays readable
        hurry.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        if metrics is not None:
            from cacher.metrics import serve_metrics

            stack.enter_context(serve_metrics(metrics, server.snapshot, loop))
        if parent is not None:
            _tell(parent, {"url": str(server.address)})
            loop.add_reader(sys.stdin.fileno(), on_parent_gone)
        _LOG.info("listening", extra={"address": str(server.address), "pid": os.getpid()})
        await _first(leave, hurry)
        if not hurry.is_set():
            drained = asyncio.create_task(server.drain())
            await _first(drained, hurry)
            drained.cancel()
        _LOG.info("stopping")


async def _first(*events: asyncio.Event | asyncio.Task[None]) -> None:
    """Wait for the first event or task."""
    tasks = [event if isinstance(event, asyncio.Task) else asyncio.create_task(_wait(event)) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _positive(options: Mapping[str, str], name: str) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (name == "max-jobs" and not value.is_integer()):
        raise InputError(f"--{name} must be a number above 0, got {options[name]!r}")
    return value
