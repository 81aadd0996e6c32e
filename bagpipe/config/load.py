"""Loads a configuration: one TOML file, then flags, then checks.

    config_keys: one Key record per field of sections.py ──> argparse flags and --help
    --config FILE.toml ──> values with "FILE:LINE" ┐
    --SECTION.KEY VALUE ──> values with "--flag"   ┴─ later wins ──> convert by type ──> check_config ──> Config

Before the checks, a `data.path` without a format gets that of its content (`data_format`), which a note names, and a
`pipeline.plan` gives the values that it says (`pipeline_plan`). Every problem is one `InputError` line: the location
(file and line, or flag), what was expected and what came. Imports neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import bagpipe
from bagpipe.config.data_format import told_formats
from bagpipe.config.keys import Given, Key, config_keys, convert, section_type
from bagpipe.config.pipeline_plan import with_plan
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.util.documents import file_text, toml_tables
from bagpipe.util.program import note
from bagpipe.util.redaction import has_password, redact
from bagpipe.util.secret_files import unprotected_mode

__all__ = ["CommandLine", "Option", "parse_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A flag of one program that is not part of the configuration, such as ``--result FILE``.

    Attributes:
        is_switch: the flag takes no value; its value is "true" if given, else empty.
    """

    flag: str
    help: str
    metavar: str = "FILE"
    default: str = ""
    is_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        config: the checked configuration.
        options: value of each extra `Option`, by its name without dashes (``--result`` -> ``result``).
    """

    config: Config
    options: Mapping[str, str]


def parse_config(
    argv: Sequence[str],
    prog: str,
    extra_options: Iterable[Option] = (),
    *,
    defaults: Mapping[str, object] = MappingProxyType({}),
    unused: Collection[str] = (),
) -> CommandLine:
    """Read ``--config FILE.toml`` and ``--SECTION.KEY VALUE`` flags; flags override the file.

    Args:
        argv: arguments without the program's name.
        prog: program name for ``--help``.
        extra_options: the program's own flags.
        defaults: the program's own defaults by key path; they override those of `bagpipe.config.sections`.
        unused: sections that the program does not use: each of their values is checked, but not what they need, and no
            file that they name is read.

    Raises:
        InputError: unknown key, wrong type, value out of range, unreadable or malformed file.
        SystemExit: after ``--help`` and ``--version``.
    """
    keys = {key.path: dataclasses.replace(key, default=defaults.get(key.path, key.default)) for key in config_keys()}
    options = tuple(extra_options)
    names = _parse_flags(_make_parser(prog, keys.values(), options), argv, keys, options)
    file_values = read_toml(Path(names.config), keys) if names.config else {}
    given = dict(file_values)
    for path in keys:
        text = getattr(names, path)
        if text is not None:
            given[path] = Given(value=text, subject=f"--{path}")
    sections: dict[str, dict[str, object]] = {}
    for path, value in defaults.items():
        sections.setdefault(keys[path].section, {})[keys[path].name] = value
    for path, item in given.items():
        key = keys[path]
        sections.setdefault(key.section, {})[key.name] = convert(key, item)
    config = Config(**{field.name: _build_section(field.name, sections) for field in dataclasses.fields(Config)})
    if "pipeline" not in unused:
        pipeline, dense = with_plan(config.pipeline, config.dense)
        config = dataclasses.replace(config, pipeline=pipeline, dense=dense)
    config = dataclasses.replace(config, data=told_formats([config.data])[0])
    check_config(config, {path: item.subject for path, item in given.items()}, unused)
    if names.config:
        _check_private(names.config, file_values, refuse=config.run.strict)
    values = {option.flag.lstrip("-"): getattr(names, option.flag) for option in options}
    return CommandLine(config=config, options=values)


def read_toml(path: Path, keys: Mapping[str, Key]) -> dict[str, Given]:
    """The values of a configuration file, by key path. Raises InputError with the file and line."""
    text = file_text(path, subject="--config")
    document = toml_tables(text, source=str(path))
    given: dict[str, Given] = {}
    known_sections = {key.section for key in keys.values()}
    for section, table in document.items():
        if section not in known_sections:
            location = f"{path}:{_line_of(text, section, None)}"
            hint = _nearest(section, sorted(known_sections), [key.path for key in keys.values() if key.name == section])
            raise InputError(f"{location}: unknown section {section!r}{hint}")
        if not isinstance(table, dict):
            location = f"{path}:{_line_of(text, section, None)}"
            raise InputError(f"{location}: {section} is a section, written [{section}], got {redact(repr(table))}")
        for name, value in table.items():
            location = f"{path}:{_line_of(text, section, name)}"
            key_path = f"{section}.{name}"
            if key_path not in keys:
                same_name = [key.path for key in keys.values() if key.name == name]
                raise InputError(f"{location}: unknown key {key_path}{_nearest(key_path, keys, same_name)}")
            given[key_path] = Given(value=value, subject=f"{location}: {key_path}")
    return given


def _check_private(path: str, given: Mapping[str, Given], *, refuse: bool) -> None:
    """Warn of a configuration file with a password that other users can read.

    Raises:
        InputError: the same, if such a file is refused.
    """
    secret = given.get("store.url")
    if secret is None or not has_password(str(secret.value)):
        return
    mode = unprotected_mode(path)
    if mode is None:
        return
    text = (
        f"{secret.subject} holds a password, and the file is open to other users: mode {mode:04o}; chmod o-rwx it, or "
        "use store.password_file"
    )
    if refuse:
        raise InputError(f"{text} (run.strict)")
    note(text)


def _line_of(text: str, section: str, name: str | None) -> int:
    """Line of a section's header or of a key in it; 1 for other notations (dotted, inline)."""
    current = header = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith("["):
            current = line.partition("]")[0].strip("[ ")
            header = current.partition(".")[0].strip("\"' ")
            if header == section and (name is None or current == f"{section}.{name}"):
                return number
        key = line.partition("=")[0].strip().replace('"', "").replace("'", "")
        if "=" not in line:
            continue
        if name is not None and ((header == section and key == name) or (not header and key == f"{section}.{name}")):
            return number
        if not header and key.partition(".")[0].strip() == section and (name is None or key == section):
            return number
    return 1


class _Parser(argparse.ArgumentParser):
    """argparse that raises InputError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{redact(message)} (--help lists the options)")


def _make_parser(prog: str, keys: Iterable[Key], options: Iterable[Option]) -> _Parser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        usage=f"{prog} [--config FILE.toml] [--SECTION.KEY VALUE ...]",
        description="Values come from the defaults, then the file, then the flags.",
        epilog="Exit codes: 0 done, 1 failure, 2 bad configuration or input, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {bagpipe.__version__}")
    parser.add_argument("--config", metavar="FILE", default="", help="TOML file with the sections below")
    for option in options:
        how: dict[str, Any] = (
            {"action": "store_const", "const": "true"} if option.is_switch else {"metavar": option.metavar}
        )
        parser.add_argument(
            option.flag, dest=option.flag, default=option.default, help=option.help.replace("%", "%%"), **how
        )
    groups: dict[str, Any] = {}
    for key in keys:
        if key.section not in groups:
            title = (section_type(key.section).__doc__ or key.section).splitlines()[0].removesuffix(".")
            groups[key.section] = parser.add_argument_group(f"[{key.section}] {title}")
        text = f"{key.help} ({key.values}; default: {_show(key.default)})".replace("%", "%%")
        groups[key.section].add_argument(f"--{key.path}", dest=key.path, metavar=key.name.upper(), help=text)
    return parser


def _parse_flags(
    parser: _Parser, argv: Sequence[str], keys: Mapping[str, Key], options: Iterable[Option]
) -> argparse.Namespace:
    """argparse's namespace; unknown arguments are an InputError with the nearest known flag."""
    names, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise InputError(f"expected flags such as --data.path FILE, got {redact(repr(flag))}")
        known = [f"--{path}" for path in keys] + [option.flag for option in options] + ["--config", "--help"]
        same_name = [f"--{key.path}" for key in keys.values() if key.name == flag.lstrip("-").rpartition(".")[2]]
        raise InputError(f"unknown option {redact(flag)}{_nearest(flag, known, same_name)}")
    return names


def _nearest(word: str, known: Iterable[str], better: Sequence[str]) -> str:
    """``; did you mean …?``: up to three names of the first kind that there is.

    The kinds: `better`; names that continue `word`; the keys of its section, or of all, that end with its words, as
    ``optim.dense_lr`` does with ``optim.lr``, or that begin with them; the most similar name.
    """
    names = list(known)
    starts = [name for name in names if name.startswith(word)]
    section, _, last = word.rpartition(".")
    last = last.lstrip("-")
    keys = [name for name in names if name.startswith(section)]
    ends = [name for name in keys if name.endswith(f"_{last}")]
    begins = [name for name in keys if name.rpartition(".")[2].startswith(f"{last}_")]
    found = (better or starts or ends or begins or difflib.get_close_matches(word, names, n=1))[:3]
    return f"; did you mean {' or '.join(found)}?" if found else " (--help lists them)"


def _build_section(section: str, values: Mapping[str, Mapping[str, object]]) -> Any:
    return section_type(section)(**values.get(section, {}))


def _show(value: object) -> str:
    """A default in the notation of a flag."""
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
