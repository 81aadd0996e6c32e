"""Places of the programs, and the commands by which other processes run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.util import programs
from bagpipe.util.programs import COMMANDS, PROGRAMS, command_of, import_program, module_command, module_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_checkout_has_them_beside_the_library(program):
    assert programs.module_of(program) == program
    assert import_program(program).__file__ == str(ROOT / program / "cli.py")


def test_commands_as_a_person_types_them(monkeypatch):
    assert [command_of(name) for name in ("train", "eval", "data")] == [
        "python -m trainer",
        "python -m trainer eval",
        "python -m data",
    ]
    monkeypatch.setattr(programs, "_is_installed", lambda: True)
    assert [command_of(name) for name in COMMANDS] == [f"bagpipe {name}" for name in COMMANDS]
    assert programs.module_of("cacher") == "bagpipe.programs.cacher"


def test_another_process_finds_what_this_one_finds(tmp_path, monkeypatch):
    """But not the modules of the folder where it starts."""
    (tmp_path / "data.py").write_text("raise AssertionError")
    (tmp_path / "here.py").write_text("")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT)])
    for module, told in (("data", "usage: python -m data"), ("here", "No module named here")):
        done = subprocess.run(
            [*module_command(module), "--help"],
            cwd=tmp_path,
            env=module_environment(),
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert told in done.stdout + done.stderr
