"""How fast is training from a remote store beside other ways to train the same model on the same batches?

    python -m benchmarks.peers.main [--data.path FILE] [--settings criteo wide] [--repeats 4] [--out DIR]

Needs root, `ip` and `tc`. The data is a file of Criteo's click logs: --data.path, or $BAGPIPE_CRITEO_SAMPLE; without
either, synthetic data of the same size and skew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from bagpipe.util.environment import check_environment
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.click_logs import add_data_path, data_or_synthetic_notes
from benchmarks.harness.machine import TRAINING_PACKAGES, store_server
from benchmarks.harness.shaped_link import check_privileges
from benchmarks.peers.contenders import CONTENDERS, Outcome
from benchmarks.peers.launcher import line_of, run_setting
from benchmarks.peers.report import draw, tables
from benchmarks.peers.settings import SETTINGS

#: Examples of the real sample, and of the synthetic data that replaces it.
_SAMPLE_EXAMPLES = 80_000


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    check_environment()
    check_privileges()
    if options.path and not Path(options.path).is_file():
        raise InputError(f"--data.path: {options.path} does not exist")
    return {name: partial(_measure, options, name) for name in options.settings}


def _measure(options: argparse.Namespace, setting: str, part: Part) -> None:
    data: dict[str, Any] = {"format": "synthetic", "limit": options.examples}
    if options.path:
        data = {"path": str(Path(options.path).resolve()), "format": "criteo-tsv"}

    def told(outcome: Outcome) -> None:
        part.add(asdict(outcome))
        part.say(line_of(outcome))

    run_setting(setting, options.contenders, data, repeats=options.repeats, tries=options.tries, told=told)


def _flags(parser: argparse.ArgumentParser) -> None:
    add_data_path(parser)
    parser.add_argument("--examples", type=int, default=_SAMPLE_EXAMPLES, help="of synthetic data")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each contender, interleaved")
    parser.add_argument("--tries", type=int, default=3, help="times a run that other jobs disturb is made")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    draw=draw,
    rehearsal={
        "path": "",
        "examples": 40_000,
        "settings": ["narrow"],
        "contenders": ["ours cached", "torchrec", "redis-py"],
        "repeats": 1,
        "tries": 1,
    },
    packages=(*TRAINING_PACKAGES, "redis", "hiredis"),
    machine=store_server,
    facts=data_or_synthetic_notes,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
