"""`python -m data COMMAND`: tools around the readers.

    synth     seed ──> Criteo-format text (.tsv, .tsv.gz) or the columnar form (.arrow, .parquet)
    convert   any format ──> the columnar form: one file, or a folder of parts made in several processes
    replay    any format ──> what caches, windows and policies would cost (`data.replay`)

Exit codes: 0 done; 1 failure; 2 bad input, in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from tqdm import tqdm

from bagpipe.config.data_format import told_formats
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.util.outputs import cannot_write
from bagpipe.util.printing import print_error, printable
from bagpipe.util.process_pool import usable_cores
from bagpipe.util.program import printed_warnings, run_program
from bagpipe.util.programs import command_of
from bagpipe.util.sizes import bytes_of
from data.clock import Clocked, with_times
from data.formats import FORMATS, open_source
from data.source import BAD_ROWS, Source

if TYPE_CHECKING:  # it needs a package that other commands do without
    from data.conversion_manifest import PartRecord
    from data.next_use_writer import NextUseOrder

__all__ = ["main"]

#: Threads of a sort of next uses, which share its memory, and bytes that `--memory` can name.
MOST_THREADS, MOST_MEMORY = 4, 16 << 40

COLUMNAR = (".arrow", ".parquet")
REPLAY = "replay"


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with printed_warnings():
        if words[:1] == [REPLAY]:  # replay parses the flags of the configuration itself
            from data.replay.cli import main as replay

            return run_program(lambda argv: replay(argv, out), words[1:])
        return run_program(lambda argv: _run(argv, out), words)


def _run(argv: Sequence[str], out: TextIO | None) -> None:
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], str] = options.run
    (out or sys.stdout).write(printable(run(options)) + "\n")


class _Parser(argparse.ArgumentParser):
    """A parser that tells an error in one line, like that of the configuration."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=command_of("data"), description="Tools around the data readers.")
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
    convert.add_argument("paths", nargs="+", metavar="path", help="file or folder to read, or several")
    convert.add_argument(
        "out", help="file to write, .arrow or .parquet, or a folder of such files; read it with --data.format parquet"
    )
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
    convert.add_argument(
        "--times",
        action="store_true",
        help="keep the times of avazu-csv and movielens (default: only those that a schema names)",
    )
    convert.add_argument("--bad-rows", default="stop", choices=BAD_ROWS, help="stop at a malformed row, or skip it")
    convert.add_argument("--jobs", type=int, help="processes that write a folder (default: one for each core)")
    convert.add_argument("--form", choices=("arrow", "parquet"), help="of the files of a folder (default: parquet)")
    convert.add_argument(
        "--part-segments",
        type=int,
        metavar="N",
        default=64,
        help="most segments in a file of a folder: each 4 MiB of text, or a row group (default: 64)",
    )
    convert.add_argument("--redo", action="store_true", help="replace another conversion in the folder")
    convert.add_argument(
        "--next-use",
        action="store_true",
        help="also write each row's next use, for training with --oracle.horizon log",
    )
    convert.add_argument(
        "--shuffle-seed",
        type=int,
        metavar="SEED",
        help="with --next-use: for training with data.shuffle and this run.seed (default: without data.shuffle)",
    )
    convert.add_argument("--epochs", type=int, default=1, help="with --shuffle-seed: data.epochs of the training")
    convert.add_argument(
        "--eval-fraction",
        type=float,
        help=f"with --next-use: data.eval_fraction of the training (default: {DataConfig.eval_fraction})",
    )
    convert.add_argument("--memory", help="with --next-use: most memory of the program (default: 1GiB)")
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
    source = SyntheticSource.of(found, options.seed)
    if source.clock is not None:
        source = source.with_times()
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
    if not all(options.paths):
        raise InputError("the path is empty: name a file or a folder")
    if options.limit < 0:
        raise InputError(f"--limit must be at least 0, got {options.limit}")
    if options.min_count < 1 or (options.min_count > 1 and not options.dictionaries):
        raise InputError(f"--min-count must be at least 1, and needs --dictionaries, got {options.min_count}")
    for flag, number in (("--jobs", options.jobs), ("--part-segments", options.part_segments)):
        if number is not None and number < 1:
            raise InputError(f"{flag} must be at least 1, got {number}")
    if len(options.paths) > 1 and options.dictionaries:
        raise InputError("--dictionaries reads one file or folder: build them for all the data in one folder")
    asked = DataConfig(format=options.format or "synthetic", schema=options.schema, bad_rows=options.bad_rows)
    configs = told_formats([dataclasses.replace(asked, path=path) for path in options.paths])
    order = _next_use_order(options)
    if options.dictionaries:
        _build_dictionaries(configs[0], options)
    sources = tuple(_open_input(config, needs_times=options.times) for config in configs)
    start_s = time.perf_counter()
    if Path(options.out).suffix in COLUMNAR and not Path(options.out).is_dir():
        return _convert_file(sources, options, order, start_s)
    return _convert_folder(sources, options, order, start_s)


def _open_input(config: DataConfig, *, needs_times: bool) -> Source:
    """The source of an input, with the times that its schema names, or that its format has if they are needed."""
    source = open_source(config)
    is_named = isinstance(source, Clocked) and source.clock is not None and source.clock.is_named
    return with_times(source, config.format, "--times") if needs_times or is_named else source


def _convert_file(
    sources: tuple[Source, ...], options: argparse.Namespace, order: NextUseOrder | None, start_s: float
) -> str:
    from data.columnar_writer import write_columnar
    from data.next_use_writer import write_annotated

    given = [flag for flag in ("jobs", "form", "redo") if getattr(options, flag)]
    if given or len(sources) > 1:
        what = f"--{given[0]}" if given else "several paths"
        raise InputError(f"{what}: needs a folder to write, got the name of a file, {options.out!r}")
    _make_folder(options.out)
    if order is None:
        written = write_columnar(sources[0], options.out, options.limit)
    else:
        written = write_annotated(sources[0], options.out, order, options.limit)
    return _report(options.out, written.rows, written.skipped, written.num_bytes, time.perf_counter() - start_s)


def _next_use_order(options: argparse.Namespace) -> NextUseOrder | None:
    """The order of training whose next uses are written; None: none are."""
    from data.next_use_writer import LEAST_MEMORY, NextUseOrder

    eval_fraction = DataConfig.eval_fraction if options.eval_fraction is None else options.eval_fraction
    if not options.next_use:
        flags = ("shuffle_seed", "eval_fraction", "memory")
        given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(options, flag) is not None]
        if given or options.epochs != 1:
            raise InputError(f"{[*given, '--epochs'][0]} needs --next-use")
        return None
    if options.epochs < 1 or (options.epochs > 1 and options.shuffle_seed is None):
        raise InputError(f"--epochs must be at least 1, and needs --shuffle-seed, got {options.epochs}")
    if not 0 <= (options.shuffle_seed or 0) < 1 << 63:
        raise InputError(f"--shuffle-seed must be from 0 to 2**63 - 1, as run.seed, got {options.shuffle_seed}")
    if not 0 <= eval_fraction < 1:
        raise InputError(f"--eval-fraction must be at least 0 and below 1, got {eval_fraction}")
    memory = options.memory or "1GiB"
    memory_bytes = bytes_of("--memory", memory)
    if not LEAST_MEMORY <= memory_bytes < MOST_MEMORY:
        raise InputError(f"--memory must be at least {LEAST_MEMORY >> 20}MiB, at most 16TiB, got {memory}")
    return NextUseOrder(
        eval_fraction=eval_fraction,
        seed=options.shuffle_seed,
        epochs=options.epochs,
        memory_bytes=int(memory_bytes),
        threads=min(MOST_THREADS, options.jobs or usable_cores()),
    )


def _convert_folder(
    sources: tuple[Source, ...], options: argparse.Namespace, order: NextUseOrder | None, start_s: float
) -> str:
    from data.conversion import Conversion, convert_folder
    from data.next_use_folder import convert_annotated

    if Path(options.out).suffix and not Path(options.out).is_dir() and not options.out.endswith("/"):
        raise InputError(
            f"expected a file name ending in {' or '.join(COLUMNAR)}, or a folder (a new one whose name has a dot "
            f"ends in /), got {options.out!r}"
        )
    conversion = Conversion(
        sources=sources,
        folder=Path(options.out),
        form=options.form or "parquet",
        schema_path=options.schema,
        limit=options.limit,
        part_segments=options.part_segments,
        jobs=options.jobs or usable_cores(),
        redo=options.redo,
    )
    watch = partial(_watch_parts, "convert")
    if order is None:
        records = convert_folder(conversion, watch)
    else:
        records = convert_annotated(conversion, order, watch, partial(_watch_parts, "next uses"))
    rows, skipped, num_bytes = (
        sum(getattr(record, name) for record in records) for name in ("rows", "skipped", "num_bytes")
    )
    kept = sum(record.is_kept for record in records)
    files = f"{len(records):,} file{'s' if len(records) != 1 else ''}{f', {kept:,} of them kept' if kept else ''}"
    return f"{_report(options.out, rows, skipped, num_bytes, time.perf_counter() - start_s)}, {files}"


def _watch_parts(what: str, records: Iterable[PartRecord], total: int) -> Iterator[PartRecord]:
    rows = 0
    with tqdm(total=total, desc=what, unit=" files", leave=False, disable=None) as bar:
        for record in records:
            rows += record.rows
            bar.set_postfix_str(f"{rows:,} rows", refresh=False)
            bar.update()
            yield record


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
