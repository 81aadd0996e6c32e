"""`python -m data COMMAND`: tools around the readers.

    synth     seed ──> Criteo-format text (.tsv, .tsv.gz) or the columnar form (.arrow, .parquet)
    convert   any format ──> the columnar form
    replay    any format ──> what caches, windows and policies would cost (`data.replay`)

Exit codes: 0 done; 1 failure; 2 bad input, in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.util.outputs import cannot_write
from bagpipe.util.printing import print_error
from bagpipe.util.program import run_program
from bagpipe.util.programs import command_of
from data.formats import FORMATS, open_source
from data.source import BAD_ROWS

__all__ = ["main"]

COLUMNAR = (".arrow", ".parquet")
REPLAY = "replay"


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == [REPLAY]:  # replay parses the flags of the configuration itself
        from data.replay.cli import main as replay

        return run_program(lambda argv: replay(argv, out), words[1:])
    options = _parser().parse_args(words)
    run: Callable[[argparse.Namespace], str] = options.run

    def tell(_: Sequence[str]) -> None:
        (out or sys.stdout).write(run(options) + "\n")

    return run_program(tell, words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command_of("data"), description="Tools around the data readers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    synth = commands.add_parser("synth", help="write synthetic click logs")
    synth.add_argument("--out", required=True, help="file to write: .tsv, .tsv.gz (Criteo format), .arrow or .parquet")
    synth.add_argument("--rows", type=int, help="examples (default: the schema's, or 200000)")
    synth.add_argument("--tables", type=int, help="sparse features C1..Cn (default 26, which the text format needs)")
    synth.add_argument("--profile", help="ids like criteo-sample (default) or at full scale: criteo-kaggle")
    synth.add_argument("--schema", default="", help="schema TOML with a [synthetic] section")
    synth.add_argument("--seed", type=int, default=0, help="seed of everything (default 0)")
    synth.set_defaults(run=_synth)
    convert = commands.add_parser("convert", help="write any data as .arrow (fastest) or .parquet (smallest)")
    convert.add_argument("path", help="file or folder to read")
    convert.add_argument("out", help="file to write: .arrow or .parquet; read it back with --data.format parquet")
    formats = tuple(name for name in FORMATS if name != "synthetic")
    convert.add_argument("--format", default="", choices=formats, help="of the input (default: told from its content)")
    convert.add_argument("--schema", default="", help="schema TOML of the input")
    convert.add_argument("--limit", type=int, default=0, help="convert only the first so many rows")
    convert.add_argument(
        "--dictionaries",
        default="",
        choices=("first", "frequency"),
        help="first build the dictionaries that the schema names, with ids by first occurrence or by frequency",
    )
    convert.add_argument("--min-count", type=int, default=1, help="leave rarer strings out of the dictionaries")
    convert.add_argument("--bad-rows", default="stop", choices=BAD_ROWS, help="stop at a malformed row, or skip it")
    convert.set_defaults(run=_convert)
    commands.add_parser(REPLAY, help="count what caches, windows and policies would fetch and write, without training")
    return parser


def _synth(options: argparse.Namespace) -> str:
    from data.columnar_writer import write_columnar
    from data.criteo_writer import write_criteo_text
    from data.synthetic import SyntheticSource
    from data.synthetic_options import options_at

    found = options_at(options.schema, tables=options.tables, profile=options.profile)
    if options.rows is not None:
        found = dataclasses.replace(found, rows=options.rows)
    source = SyntheticSource(
        schema=found.schema,
        features=found.features,
        rows=found.rows,
        seed=options.seed,
        label_rate=found.label_rate,
    )
    _make_folder(options.out)
    start_s = time.perf_counter()
    if Path(options.out).suffix in COLUMNAR:
        num_bytes = write_columnar(source, options.out).num_bytes
    elif options.out.endswith((".tsv", ".tsv.gz", ".txt", ".gz")):
        num_bytes = write_criteo_text(source, options.out)
    else:
        raise InputError(f"--out must end in .tsv, .tsv.gz, .arrow or .parquet, got {options.out!r}")
    return _report(options.out, found.rows, 0, num_bytes, time.perf_counter() - start_s)


def _convert(options: argparse.Namespace) -> str:
    from data.columnar_writer import write_columnar

    if not options.path:
        raise InputError("the path is empty: name a file or a folder")
    if options.limit < 0:
        raise InputError(f"--limit must be at least 0, got {options.limit}")
    if options.min_count < 1 or (options.min_count > 1 and not options.dictionaries):
        raise InputError(f"--min-count must be at least 1, and needs --dictionaries, got {options.min_count}")
    config = DataConfig(
        path=options.path, format=options.format or "synthetic", schema=options.schema, bad_rows=options.bad_rows
    )
    if options.dictionaries:
        _build_dictionaries(config, options)
    source = open_source(config)
    _make_folder(options.out)
    start_s = time.perf_counter()
    written = write_columnar(source, options.out, options.limit)
    return _report(options.out, written.rows, written.skipped, written.num_bytes, time.perf_counter() - start_s)


def _build_dictionaries(config: DataConfig, options: argparse.Namespace) -> None:
    from data.dictionary_builder import build_dictionaries

    source = open_source(config, needs_dictionaries=False)
    built = build_dictionaries(source, options.dictionaries, min_count=options.min_count, limit=options.limit)
    for path, strings in built.items():
        print_error(f"{path}: {strings:,} strings")


def _make_folder(path: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def _report(path: str, rows: int, skipped: int, num_bytes: int, seconds: float) -> str:
    left_out = f", {skipped:,} malformed rows left out" if skipped else ""
    return f"{path}: {rows:,} rows{left_out}, {num_bytes / 1e6:,.1f} MB, {rows / max(seconds, 1e-9):,.0f} rows/s"
