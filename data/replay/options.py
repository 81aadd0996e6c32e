"""`Sweep`: the options of `python -m data replay`: one configuration per batch size, and the values to vary.

argv ──--data.batch_size A,B: once with A, once with B──> parse_config ──> Config, Config
     ├─--lookahead, --cache_rows, --policy: lists ──────────────────────> Sweep
     └─--thresholds, --limits: lists ─────────────────────────────> Tried ──^

Accepts all flags of the configuration except those that the sweep varies. A file can hold these too, and whatever a job
needs besides; they then apply to the trainer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from bagpipe.config.keys import CONVERTERS
from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import Config, DataConfig
from bagpipe.errors import InputError
from bagpipe.oracle.eviction import POLICIES
from bagpipe.oracle.spec_check import MAX_RANKS
from bagpipe.util.outputs import check_writable
from bagpipe.util.programs import command_of
from bagpipe.util.sizes import bytes_of
from data.replay.baselines import BASELINES
from data.replay.next_use_file import LOG_POLICY
from data.replay.records import Link
from data.replay.savings import Tried

__all__ = ["KNOWN_POLICIES", "NO_POLICY", "Sweep", "parse_sweep"]

BATCH_SIZE_FLAG = "--data.batch_size"

#: Policies of the oracle, which training supports, the last one on annotated files; then the baselines.
KNOWN_POLICIES = (*POLICIES, LOG_POLICY, *BASELINES)

#: Replay uses the whole log; the trainer holds a part of it out.
DEFAULTS: Mapping[str, object] = MappingProxyType({"data.eval_fraction": 0.0})

#: Sections of a job's file that only its trainer uses.
UNUSED = ("checkpoint", "dense", "eval", "pipeline")

#: The default policy, the common one without an oracle, and the lower bound.
DEFAULT_POLICIES = "belady-window,lru,offline-belady"

OPTIONS = (
    Option(
        flag="--lookahead",
        metavar="N,…",
        help="windows to try, in batches (default: those of 2, 8, 16, … 256 the log has)",
    ),
    Option(
        flag="--cache_rows",
        metavar="N,…",
        help="cache sizes to try, in rows per rank (default: 2, 5, 10, 20 and 50 % of the distinct rows)",
    ),
    Option(
        flag="--policy",
        metavar="NAME,…",
        default=DEFAULT_POLICIES,
        help=f"of {', '.join(KNOWN_POLICIES)}; none: only --thresholds, --limits (default: {DEFAULT_POLICIES})",
    ),
    Option(flag="--world_size", metavar="N", default="1", help="ranks (default: 1)"),
    Option(flag="--json", help="write the records, a list with one object per combination"),
    Option(flag="--csv", help="write the records as CSV, with a line of names"),
    Option(flag="--report", help="write the report, one HTML file"),
    Option(
        flag="--bandwidth",
        metavar="BYTES",
        default="1.25GB",
        help="a second, of your link to the store, for seconds beside bytes (default: 1.25GB, which is 10 Gbit/s)",
    ),
    Option(
        flag="--row_bytes",
        metavar="BYTES",
        help="of your model's rows with optimizer state (default: those of the replayed model)",
    ),
    Option(
        flag="--jobs",
        metavar="N",
        default="1",
        help="processes that replay settings at the same time, each with its own window and cache (default: 1)",
    ),
    Option(
        flag="--thresholds",
        metavar="K,…",
        help="values of data.min_uses: count the rows that each would save",
    ),
    Option(
        flag="--limits",
        metavar="AGE,…",
        help="values of data.expire_after, in data.expire_unit: count the rows that each would delete",
    ),
    Option(flag="--train", is_switch=True, help="also train with the recommended setting and its neighbours"),
)

#: Keys of the configuration that the sweep varies, and the option of each.
VARIED = MappingProxyType(
    {
        "--cache.rows": "--cache_rows",
        "--oracle.lookahead": "--lookahead",
        "--oracle.policy": "--policy",
        "--oracle.horizon": "--policy",
    }
)


#: Keys of the rules whose values --thresholds and --limits try. A file can hold them; they then apply to the trainer.
TRIED_KEYS = MappingProxyType(
    {
        "--data.min_uses": "--thresholds",
        "--data.min_uses_by_table": "--thresholds",
        "--data.expire_after": "--limits",
        "--data.expire_after_by_table": "--limits",
    }
)

#: The policy that stands for none: only thresholds and limits are counted.
NO_POLICY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Options of a replay.

    Attributes:
        configs: one per batch size, otherwise equal; without rules of admission and expiry if `tried` is given.
        policies: names as given, known or not; empty: only count what is tried.
        lookaheads, cache_rows: values to try; empty: chosen from the log.
        world_size: ranks.
        json_path, csv_path, report_path: output files; empty: none.
        link: the link to the store, for seconds.
        train: also run the trainer.
        trainer_flags: the configuration flags as given, for the trainer.
        jobs: processes.
        tried: thresholds and limits whose savings are counted; None: none.
    """

    configs: tuple[Config, ...]
    policies: tuple[str, ...]
    lookaheads: tuple[int, ...]
    cache_rows: tuple[int, ...]
    world_size: int
    json_path: str
    report_path: str
    train: bool
    trainer_flags: tuple[str, ...]
    csv_path: str = ""
    link: Link = field(default_factory=Link)
    jobs: int = 1
    tried: Tried | None = None


def parse_sweep(argv: Sequence[str]) -> Sweep:
    """Parse the flags.

    Raises:
        InputError: a flag is unknown, out of range, or has no effect; no known policy; an output cannot be written or
            would overwrite the log.
        SystemExit: after ``--help``.
    """
    for name in _names(argv):
        if name in VARIED:
            raise InputError(f"{name}: replay tries several, expected {VARIED[name]}")
    sizes = _batch_sizes(argv)
    prog = f"{command_of('data')} replay"
    # The unit of the limits is a key that needs one.
    defaults = {**DEFAULTS, "data.expire_after": 1.0} if "--limits" in _names(argv) else DEFAULTS
    lines = [
        parse_config(_with_batch_size(argv, size), prog, OPTIONS, defaults=defaults, unused=UNUSED) for size in sizes
    ]
    options, configs = lines[0].options, tuple(line.config for line in lines)
    tried = _tried(options, argv, configs[0].data)
    if tried is not None:
        configs = tuple(dataclasses.replace(config, data=_without_rules(config.data)) for config in configs)
    policies = tuple(dict.fromkeys(name.strip() for name in options["policy"].split(",")))
    if policies == (NO_POLICY,):
        if tried is None:
            raise InputError(f"--policy {NO_POLICY} counts only --thresholds and --limits, expected one of them")
        if options["csv"]:
            raise InputError(
                f"--csv has a line for each policy's record, and --policy {NO_POLICY} has none: expected --json"
            )
        policies = ()
    elif NO_POLICY in policies:
        raise InputError(f"--policy {NO_POLICY} replays nothing: expected it alone, got {options['policy']!r}")
    elif not set(policies) & set(KNOWN_POLICIES):
        raise InputError(_unknown_policy(policies[0]))
    if options["train"] and not set(policies) & set(POLICIES):
        raise InputError(f"--train: only {' and '.join(POLICIES)} can be trained with, --policy has none of them")
    _check_outputs(options, configs[0].data)
    return Sweep(
        configs=configs,
        policies=policies,
        lookaheads=_whole_numbers("--lookahead", options["lookahead"]) if options["lookahead"] else (),
        cache_rows=_whole_numbers("--cache_rows", options["cache_rows"]) if options["cache_rows"] else (),
        world_size=_world_size(options["world_size"]),
        json_path=options["json"],
        csv_path=options["csv"],
        report_path=options["report"],
        link=_link(options["bandwidth"], options["row_bytes"]),
        jobs=_jobs(options["jobs"]),
        train=bool(options["train"]),
        trainer_flags=_trainer_flags(argv),
        tried=tried,
    )


def policy_problem(name: str) -> str | None:
    """The reason why a policy cannot be replayed; None if it can."""
    return None if name in KNOWN_POLICIES else _unknown_policy(name)


def _unknown_policy(name: str) -> str:
    return f"--policy must be of {', '.join(KNOWN_POLICIES)}, got {name!r}"


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    _, convert = CONVERTERS[tuple[int, ...]]
    numbers = convert(text)
    if not isinstance(numbers, tuple) or not numbers or min(numbers) < 1:
        raise InputError(f"{flag} must be numbers of at least 1 such as 8,32, got {text!r}")
    return tuple(dict.fromkeys(numbers))


def _tried(options: Mapping[str, str], argv: Sequence[str], data: DataConfig) -> Tried | None:
    """The thresholds and limits; None: none are given.

    Raises:
        InputError: a number out of range, or a flag that goes with neither.
    """
    if not options["thresholds"] and not options["limits"]:
        return None
    flags = " and ".join(flag for flag in ("--thresholds", "--limits") if options[flag.lstrip("-")])
    given = next((name for name in _names(argv) if name in TRIED_KEYS), None)
    if given is not None:
        raise InputError(f"{given}: {flags} replays the log without rules for its rows, expected {TRIED_KEYS[given]}")
    if options["train"]:
        raise InputError(f"--train: not possible with {flags}, which replays the log without rules for its rows")
    thresholds = _whole_numbers("--thresholds", options["thresholds"]) if options["thresholds"] else ()
    if max(thresholds, default=1) >= 1 << 31:
        raise InputError(f"--thresholds must be numbers from 1 to 2**31 - 1, got {max(thresholds)}")
    return Tried(
        thresholds=thresholds,
        limits=_ages(options["limits"]) if options["limits"] else (),
        unit=data.expire_unit,
        every=data.expire_every,
    )


def _ages(text: str) -> tuple[float, ...]:
    try:
        ages = tuple(float(word) for word in text.split(","))
    except ValueError:
        ages = ()
    if not ages or not all(0 < age < math.inf for age in ages):
        raise InputError(f"--limits must be numbers above 0 such as 1e5,1e6, got {text!r}")
    return tuple(dict.fromkeys(ages))


def _without_rules(data: DataConfig) -> DataConfig:
    """The same data, whose rows are created at once and do not expire."""
    plain = DataConfig()
    return dataclasses.replace(
        data,
        min_uses=plain.min_uses,
        min_uses_by_table=plain.min_uses_by_table,
        default_row=plain.default_row,
        use_counts=plain.use_counts,
        sketch_cells=plain.sketch_cells,
        expire_after=plain.expire_after,
        expire_after_by_table=plain.expire_after_by_table,
        expire_unit=plain.expire_unit,
        expire_every=plain.expire_every,
    )


def _names(argv: Sequence[str]) -> list[str]:
    """The flags of a command line, without their values."""
    return [word.partition("=")[0] for word in argv]


def _world_size(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise InputError(f"--world_size must be a number from 1 to {MAX_RANKS}, got {text!r}")
    return int(text)


def _jobs(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise InputError(f"--jobs must be a number of at least 1, got {text!r}")
    return int(text)


def _link(bandwidth: str, row_bytes: str) -> Link:
    return Link(
        bytes_per_s=bytes_of("--bandwidth", bandwidth),
        row_bytes=bytes_of("--row_bytes", row_bytes) if row_bytes else None,
    )


def _check_outputs(options: Mapping[str, str], data: DataConfig) -> None:
    """Refuse outputs that cannot be written, or that would overwrite the log, its schema or each other."""
    taken = {
        Path(path).resolve(): key for key, path in (("data.path", data.path), ("data.schema", data.schema)) if path
    }
    for option in ("json", "csv", "report"):
        path = options[option]
        if not path:
            continue
        check_writable(path, f"--{option}")
        target = Path(path).resolve()
        if target in taken:
            raise InputError(f"--{option}: {path} is {taken[target]}, expected another file")
        if taken.get(target.parent) == "data.path":
            raise InputError(f"--{option}: {path} is in the folder data.path, whose files are the log")
        taken[target] = f"--{option}"


def _batch_sizes(argv: Sequence[str]) -> tuple[str, ...]:
    """The last list given, as texts; one empty text if none is."""
    given = [argv[position + 1] for position, word in enumerate(argv[:-1]) if word == BATCH_SIZE_FLAG]
    given += [word.partition("=")[2] for word in argv if word.startswith(f"{BATCH_SIZE_FLAG}=")]
    return tuple(dict.fromkeys(size.strip() for size in given[-1].split(","))) if given else ("",)


def _with_batch_size(argv: Sequence[str], size: str) -> list[str]:
    """The same flags with one batch size: a later flag wins."""
    return [*argv, f"{BATCH_SIZE_FLAG}={size}"] if size else list(argv)


def _trainer_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """Without the options of replay itself and the batch sizes."""
    takes_value = {option.flag: not option.is_switch for option in OPTIONS} | {BATCH_SIZE_FLAG: True}
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            kept.append(word)
        elif takes_value[name] and not equals:
            next(words, None)
    return tuple(kept)
