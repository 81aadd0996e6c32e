"""The command lines of README, docs and examples: every option exists, and those that need nothing run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest

from bagpipe.cli.main import main as bagpipe_main
from bagpipe.schedule.registry import SCHEDULES
from bagpipe.util.programs import COMMANDS, import_program
from tests.docs.pages import PAGES, blocks, command_blocks, read

PROGRAM = re.compile(
    r"(?:^|[\s|(])(?:-m (trainer|cacher|data|bagpipe(?:\.train)?)|(bagpipe) (?=[a-z]))(?= |$|[a-z])(.*)"
)
#: Subcommands by program; without one the program is the whole command.
SUBCOMMANDS = {
    "trainer": ("eval", "export", "predict", "rows"),
    "data": ("convert", "replay", "synth"),
    "bagpipe": (*COMMANDS, "schedule", "plan", "calibrate", "sweep", "jigsaw"),
}
OPTION = re.compile(r"--[A-Za-z][\w.-]*")
#: Text of a page that stands for something of the reader's.
PLACEHOLDER = re.compile(r"…|\.\.\.|\$|[\[\]|<>]|\.json\b|\bFILE\b")


def commands(page: str) -> Iterator[tuple[str, ...]]:
    """Words of the page's commands, from the program's name on: ``("trainer", "eval", "--config", …)``."""
    for block in command_blocks(page):
        for line in block:
            if match := PROGRAM.search(line):
                program = (match[1] or match[2]).removesuffix(".train")
                program = "trainer" if match[1] == "bagpipe.train" else program
                yield (program, *shlex.split(match[3].replace("'", "").replace('"', "")))


ALL = sorted({command for page in PAGES if page != "CHANGELOG.md" for command in commands(page)})


@cache
def options(program: str, subcommand: str, name: str = "") -> frozenset[str]:
    """The options of a command, by its own help."""
    if program == "bagpipe" and subcommand in COMMANDS:
        program, words = COMMANDS[subcommand]
        subcommand, name = "", " ".join(words)
    words = [word for word in (subcommand, *name.split()) if word]
    run = bagpipe_main if program == "bagpipe" else import_program(program).main
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as end:
        run([*words, "--help"])
    assert end.value.code == 0
    return frozenset(OPTION.findall(text.getvalue()))


def test_the_pages_have_commands_of_every_program():
    assert {command[0] for command in ALL} >= {"trainer", "cacher", "data", "bagpipe"}
    assert {command[1] for command in ALL if command[0] == "trainer" and len(command) > 1} >= {"eval", "export"}
    assert len(ALL) > 50
    assert not options("trainer", "eval") >= {"--no-such-option"}


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w%-]+):", read("Makefile"), re.MULTILINE))
    patterns = [re.compile(target.replace("%", ".+")) for target in targets]
    used = {name for page in PAGES for block in blocks(page) for name in re.findall(r"^make ([\w-]+)", block, re.M)}
    assert used
    assert not {name for name in used if not any(pattern.fullmatch(name) for pattern in patterns)}


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_options_exist(command: tuple[str, ...]):
    program, *words = command
    known = SUBCOMMANDS.get(program, ())
    subcommand = words[0] if words and words[0] in known else ""
    if program in ("data", "bagpipe"):
        assert subcommand, f"expected one of {', '.join(known)}"
    name = words[1] if subcommand == "schedule" and len(words) > 1 and words[1] in SCHEDULES else ""
    used = {match[0] for word in words if (match := OPTION.match(word))}
    if program == "data" and subcommand in ("convert", "synth"):
        assert used <= options(program, subcommand) | {"--help"}
    else:
        assert used <= options(program, subcommand, name), command


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in ALL
        if command[:2] == ("bagpipe", "schedule") and not PLACEHOLDER.search(" ".join(command))
    ],
    ids=" ".join,
)
def test_schedules_are_drawn(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert bagpipe_main(command[1:]) == 0
    assert capsys.readouterr().out
