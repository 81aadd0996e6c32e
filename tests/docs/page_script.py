"""The commands of a page as one shell script, in the page's order, by the table in commands.toml.

A script runs in a copy of the checkout, or, with the commands of an installed wheel, in a folder with trainer/configs.

page ──command_blocks──> commands ── not run? ──> left out
                             └── given before it ── words replaced ── serves? fails? ──> lines of bash
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.docs.pages import PAGES, command_blocks

__all__ = ["COMMAND_PAGES", "entries", "page_script", "table"]

#: Pages with commands.
COMMAND_PAGES = [page for page in PAGES if page != "CHANGELOG.md" and command_blocks(page)]

#: Ends the servers that are still there; a command that fails ends the script.
_HEAD = """set -eo pipefail
trap 'code=$?; kill $(jobs -p) 2> /dev/null || :; wait; exit $code' EXIT
"""


#: What a wheel does not have.
_OF_CHECKOUT = re.compile(r"^make |-m (tests|examples|tools)\.|examples[/.]")

#: The table in docs/running.md: commands in a checkout -> from a wheel.
_OF_WHEEL = (
    (r"(?:\.venv/bin/)?python -m trainer +(?=(?:apply|eval|export|predict) )", "bagpipe "),
    (r"(?:\.venv/bin/)?python -m trainer", "bagpipe train"),
    (r"(?:\.venv/bin/)?python -m (cacher|data) ", r"bagpipe \1 "),
    (r"(?:\.venv/bin/)?python -m bagpipe ", "bagpipe "),
    (r" -m trainer", " -m bagpipe.train"),
    (r"\.venv/bin/", ""),
)


@cache
def table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """commands.toml: kind of entry, page, beginning of a command, value."""
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def entries(kind: str, page: str) -> Mapping[str, Any]:
    """The entries of a page: values by the beginnings of commands, or words by words."""
    return table()[kind].get(page, {})


def page_script(page: str, *, of_wheel: bool = False) -> str:
    """Commands that end with the exit code 0, unless the table says otherwise, else the script ends with theirs.

    Args:
        page: path of the page.
        of_wheel: the commands of an installed wheel; those that need a checkout are left out.
    """
    lines, given = [_HEAD], dict(entries("given", page))
    for command in (command for block in command_blocks(page) for command in block):
        lines += [_given(given.pop(name)) for name in [*given] if command.startswith(name)]
        if _of(entries("not_run", page), command) is not None or (of_wheel and _OF_CHECKOUT.search(command)):
            continue
        text = command
        for word, replacement in entries("words", page).items():
            text = text.replace(word, _given(replacement))
        lines.append(f"printf '%4d s  %s\\n' $SECONDS {shlex.quote(text)}")
        code = _of(entries("fails", page), command)
        if _of(entries("serves", page), command) is not None:
            text += " &"
        elif code is not None:
            text = f"{text} || [ $? = {code} ]"
        lines.append(text)
    script = "\n".join(lines) + "\n"
    for pattern, replacement in _OF_WHEEL if of_wheel else ():
        script = re.sub(pattern, replacement, script)
    return script


def _given(text: str) -> str:
    """With tests.docs.given for each ``given``: no function, so that a server is a job of the shell, which ends it."""
    return re.sub(r"\bgiven (?=[a-z])", "env PYTHONPATH=$CHECKOUT python -m tests.docs.given ", text)


def _of(found: Mapping[str, Any], command: str) -> Any:
    """The value of the entry whose name begins the command; None without one."""
    return next((value for name, value in found.items() if command.startswith(name)), None)
