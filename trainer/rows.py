"""`python -m trainer rows report` and `rows compact`: what a namespace holds, and a checkpoint without its old rows.

    report   store, checkpoint ──(--ages: training data)──> rows and bytes by table, rows by age: text, JSON
    compact  newest checkpoint, training data ──rows last used too long ago──> a checkpoint without them

The checkpoint of a report is the one that `checkpoint.resume` names.

Both read the configuration of the job. `report` changes nothing; `compact` changes the checkpoint folder alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.compaction import KeptRows, compact, kept_rows, newest_at_rest
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.cli.progress import Progress
from bagpipe.config.admission_rules import counts_uses
from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import CheckpointConfig, Config
from bagpipe.errors import EXIT_DONE, InputError
from bagpipe.oracle.expiry import ExpiryUnit
from bagpipe.types.schema import RowSchema
from bagpipe.util.outputs import check_writable, write_json
from bagpipe.util.printing import print_text
from bagpipe.util.program import note
from bagpipe.util.programs import command_of
from trainer.row_ages import RowAges, ages_of
from trainer.row_report import report_of, store_rows
from trainer.services import url_of_store

__all__ = ["rows"]

_UNIT = Option(flag="--unit", help="of ages: examples, steps or days (default: data.expire_unit)", metavar="UNIT")
_JSON = Option(flag="--json", help="also write it as one JSON object")
_OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "report": (
        Option(flag="--ages", help="report: count rows last used longer ago than each", metavar="N,N,..."),
        _UNIT,
        _JSON,
    ),
    "compact": (
        Option(flag="--expire-after", help="compact: leave out rows last used longer ago", metavar="N"),
        Option(flag="--table", help="compact: other limits of some tables; 0: never", metavar="TABLE=N,..."),
        Option(flag="--dry-run", help="compact: count the rows, and write nothing", is_switch=True),
        _UNIT,
        _JSON,
    ),
}
_ALL = tuple({option.flag: option for options in _OPTIONS.values() for option in options}.values())


def rows(argv: Sequence[str]) -> int:
    """Run ``python -m trainer rows``. Returns the exit code.

    Raises:
        InputError: a flag is wrong, the store or the checkpoint cannot be used, or the data is not that of the job.
        StoreError: the store failed.
    """
    command = argv[0] if argv else ""
    if command in _COMMANDS:
        parsed = parse_config(argv[1:], f"{command_of('rows')} {command}", _OPTIONS[command])
        _COMMANDS[command](parsed.config, parsed.options)
        return EXIT_DONE
    if "--help" in argv or "-h" in argv:
        parse_config(["--help"], f"{command_of('rows')} {'|'.join(_COMMANDS)}", _ALL)
    raise InputError(f"rows: expected report or compact, got {command or 'nothing'!r} (--help lists the options)")


def _report(config: Config, options: Mapping[str, str]) -> None:
    limits = _limits(options["ages"])
    if options["unit"] and not limits:
        raise InputError("--unit is that of --ages, which is not given")
    unit = _unit(config, options["unit"])
    if options["json"]:
        check_writable(options["json"], "--json")
    if not config.store.url and not config.checkpoint.dir:
        raise InputError("rows report needs store.url, checkpoint.dir or both, got none")
    checkpoint = _chosen(config.checkpoint) if config.checkpoint.dir else None
    if limits and checkpoint is None:
        raise InputError("--ages needs checkpoint.dir: ages are those at a checkpoint, got none")
    expected = None if checkpoint is None else RowSchema.from_json(checkpoint.manifest.row_schema)
    store = store_rows(url_of_store(config), config.store, expected) if config.store.url else None
    ages = _ages(config, checkpoint, unit) if checkpoint is not None and limits else None
    found = report_of(store, checkpoint, ages, limits)
    if options["json"]:
        write_json(options["json"], found.to_json())
    print_text("\n".join(found.lines()))


def _compact(config: Config, options: Mapping[str, str]) -> None:
    if not config.checkpoint.dir:
        raise InputError("rows compact needs checkpoint.dir, the folder of a job's checkpoints, got none")
    if config.checkpoint.resume != "auto":
        got = config.checkpoint.resume
        raise InputError(f"rows compact takes the newest checkpoint: checkpoint.resume must be auto, got {got}")
    default = _number("--expire-after", options["expire-after"]) if options["expire-after"] else 0.0
    own = _table_limits(options["table"])
    if not default and not any(own.values()):
        raise InputError("rows compact needs --expire-after above 0, for all tables or with --table for one, got none")
    unit = _unit(config, options["unit"])
    _check_no_rules(config)
    if options["json"]:
        check_writable(options["json"], "--json")
    folder = CheckpointFolder(Path(config.checkpoint.dir).absolute())
    checkpoint = newest_at_rest(folder)
    schema = RowSchema.from_json(checkpoint.manifest.row_schema)
    limits = _limits_by_table(schema, default, own)
    is_kept = _is_kept(_ages(config, checkpoint, unit), limits)
    rows = CheckpointRows(checkpoint.folder, checkpoint.manifest, schema)
    counts = kept_rows(rows, is_kept)
    made: Checkpoint | None = None
    if not options["dry-run"] and any(count.num_kept < count.num_rows for count in counts):
        with Progress("rows") as progress:
            show = progress.phase("writing the rows")
            made = compact(folder, checkpoint, is_kept, on_chunk=_counted(show, sum(each.num_rows for each in counts)))
    if options["json"]:
        write_json(options["json"], _values(checkpoint, made, schema, counts))
    print_text("\n".join(_lines(checkpoint, made, schema, counts, dry=bool(options["dry-run"]))))


_COMMANDS: Mapping[str, Callable[[Config, Mapping[str, str]], None]] = {"report": _report, "compact": _compact}


def _chosen(settings: CheckpointConfig) -> Checkpoint:
    """The checkpoint that a job with these settings resumes from."""
    if settings.resume == "never":
        raise InputError("rows report: checkpoint.resume must be auto, best or a step number, got never")
    found = CheckpointFolder(Path(settings.dir).absolute()).chosen(settings.resume, note)
    if found is None:
        raise InputError(f"checkpoint.dir {settings.dir} has no checkpoint")
    return found


def _ages(config: Config, checkpoint: Checkpoint, unit: ExpiryUnit) -> RowAges:
    with Progress("rows") as progress:
        return ages_of(config, checkpoint, unit, progress.phase("following the training data"))


def _check_no_rules(config: Config) -> None:
    """Refuse a job that itself says which rows live: what it recounts from the log would not agree with the rows."""
    data = config.data
    if data.expires:
        raise InputError("rows compact is for jobs without data.expire_after: this one deletes rows by its own limits")
    if counts_uses(data):
        raise InputError(
            "rows compact is for jobs without data.min_uses: a resumed job counts the uses of removed rows too, and "
            "would create them again at once"
        )


def _counted(show: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """What shows the rows of each chunk as the number of rows so far."""
    num_rows = 0

    def add(more: int) -> None:
        nonlocal num_rows
        num_rows += more
        show(num_rows, total)

    return add


def _is_kept(ages: RowAges, limits: Sequence[float]) -> Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]:
    def is_kept(table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return ages.is_kept(table, ids, limits[table]) if limits[table] else np.ones(len(ids), np.bool_)

    return is_kept


def _limits_by_table(schema: RowSchema, default: float, own: Mapping[str, float]) -> list[float]:
    """The limit of each table; 0: its rows stay, as do those that a frozen table was given, unless it is named."""
    names = [table.name for table in schema.tables]
    unknown = [name for name in own if name not in names]
    if unknown:
        raise InputError(f"--table names table {unknown[0]!r}, the checkpoint has {', '.join(names)}")
    return [own.get(table.name, 0.0 if table.is_frozen else default) for table in schema.tables]


def _limits(text: str) -> list[float]:
    """Ascending limits of `--ages`; none of an empty text."""
    found = sorted({_number("--ages", item) for item in text.split(",")}) if text else []
    if 0.0 in found:
        raise InputError(f"--ages must be numbers above 0, separated by commas, got {text!r}")
    return found


def _table_limits(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in text.split(",") if text else []:
        name, equals, number = item.strip().partition("=")
        if not name or not equals or name in found:
            raise InputError(f"--table must be TABLE=NUMBER, each table once, separated by commas, got {text!r}")
        found[name] = _number("--table", number)
    return found


def _number(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"{flag} must have numbers of at least 0, got {text!r}")
    return number


def _unit(config: Config, text: str) -> ExpiryUnit:
    known: dict[str, ExpiryUnit] = {unit: unit for unit in get_args(ExpiryUnit)}
    if text and text not in known:
        raise InputError(f"--unit must be one of {', '.join(known)}, got {text!r}")
    return known[text or config.data.expire_unit]


def _values(
    before: Checkpoint, made: Checkpoint | None, schema: RowSchema, counts: Sequence[KeptRows]
) -> dict[str, object]:
    """JSON-able."""
    return {
        "step": before.manifest.step,
        "generation_before": before.manifest.generation,
        "generation": None if made is None else made.manifest.generation,
        "tables": [
            {"name": table.name, **dataclasses.asdict(count)}
            for table, count in zip(schema.tables, counts, strict=True)
        ],
    }


def _lines(
    before: Checkpoint, made: Checkpoint | None, schema: RowSchema, counts: Sequence[KeptRows], *, dry: bool
) -> list[str]:
    total = KeptRows(num_rows=sum(count.num_rows for count in counts), num_kept=sum(count.num_kept for count in counts))
    lines = [
        f"{name}: {count.num_rows - count.num_kept:,} of {count.num_rows:,} rows are older"
        for name, count in [*zip([table.name for table in schema.tables], counts, strict=True), ("all", total)]
    ]
    step = before.manifest.step
    if made is not None:
        end = f"step {step}: the newest checkpoint is now one without them, of start {made.manifest.generation}"
    elif dry:
        end = f"step {step}: nothing was written (--dry-run)"
    else:
        end = f"step {step}: no row is older, nothing was written"
    return [*lines, end]
