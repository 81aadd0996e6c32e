"""`open_reporter`: the sinks that a configuration asks for, open, and the reporter that tells them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack

from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from trainer.observe.events import Sink
from trainer.observe.lines import LogFile, StreamLines, json_line, text_line
from trainer.observe.reporter import Reporter
from trainer.observe.trackers import TrackerSink, open_tracker

__all__ = ["open_reporter"]

#: Pace of what a person or a scrape looks at.
_LIVE_S = 0.5


def open_reporter(config: Config, membership: Membership | None) -> Reporter:
    """Open the sinks of this rank: rank 0 has all of them, another rank its metrics only.

    Args:
        config: the job.
        membership: this rank; None for a single rank.

    Raises:
        InputError: a file cannot be written, an address is in use, a tracker does not start.
    """
    with ExitStack() as stack:
        sinks = []
        for sink in _sinks(config, membership):
            stack.callback(sink.close, failed=True)
            sinks.append(sink)
        stack.pop_all()
    return Reporter(sinks)


def _sinks(config: Config, membership: Membership | None) -> Iterator[Sink]:
    run = config.run
    if run.metrics:
        from trainer.observe.exporter import Exporter

        rank, local_rank = (0, 0) if membership is None else (membership.rank, membership.local_rank)
        host, _, port = run.metrics.rpartition(":")
        number = int(port) + local_rank if int(port) else 0
        yield Exporter(host.strip("[]"), number, rank=rank, every_s=_LIVE_S)
    if membership is not None and membership.rank:
        return
    if run.log:
        try:
            yield LogFile(run.log, run.log_every_s)
        except OSError as error:
            raise InputError(f"run.log: cannot write {run.log}: {error.strerror}") from None
    if run.tensorboard:
        yield TrackerSink(open_tracker("tensorboard", config), _LIVE_S)
    for name in run.trackers:
        yield TrackerSink(open_tracker(name, config), run.log_every_s)
    # Last: what is refused before prints nothing.
    if run.log_format == "json":
        yield StreamLines(sys.stdout, json_line, run.log_every_s)
    elif sys.stderr.isatty():
        from trainer.observe.bar import Bar

        yield Bar(_LIVE_S, "" if membership is None else f"rank 0 of {membership.world_size}")
    else:
        yield StreamLines(sys.stdout, text_line, run.log_every_s)
