"""`python -m trainer --config FILE [--SECTION.KEY VALUE …] [--result out.json]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bagpipe.config_cli import EXIT_DONE, EXIT_INTERRUPTED, Option, parse_config, run_program
from bagpipe.environment import check_environment

__all__ = ["main"]


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_train))


def _train(argv: Sequence[str]) -> int:
    options = (Option(flag="--result", help="write the result as one JSON object"),)
    command_line = parse_config(argv, "python -m trainer", options)
    config = command_line.config
    # Before anything imports torchrec: with a wrong set of packages that import fails with an unreadable error.
    check_environment(config.run.device)
    from trainer.job import run_job

    result = run_job(config, result_path=command_line.options["result"])
    sys.stdout.write("\n".join(result.lines()) + "\n")
    return EXIT_INTERRUPTED if result.stopped else EXIT_DONE
