"""`python -m bagpipe calibrate`: measure this machine into a cluster file, for `plan` and `sweep`."""

from __future__ import annotations

import argparse
from subprocess import SubprocessError

from bagpipe.cli.progress import Progress
from bagpipe.cli.text import write_text
from bagpipe.cluster.cluster_file import to_toml
from bagpipe.errors import InputError, StoreError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Measure this machine's processor, loopback, store server and planner; print a cluster file."
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the job; default: 1")
    parser.add_argument("--out", metavar="FILE", help="write the file instead of printing it")


def run(flags: argparse.Namespace) -> str:
    """The cluster file.

    Raises:
        InputError: a bad flag, a file that cannot be written, or no store server is found.
    """
    from bagpipe.calibration.machine import measure_machine  # with torch

    if flags.ranks < 1:
        raise InputError(f"--ranks: expected at least 1, got {flags.ranks}")
    try:
        with Progress("calibrate") as progress:
            machine = measure_machine(flags.ranks, on_measured=progress.phase("measuring"))
    except (StoreError, OSError, SubprocessError) as error:
        raise InputError(f"this machine cannot be measured: {error}") from None
    text = f"# This machine, as `python -m bagpipe calibrate` measured it.\n{to_toml(machine)}"
    if not flags.out:
        return text
    write_text("--out", flags.out, text)
    return f"{flags.out}: {machine.name}, {machine.num_ranks} ranks\n"
