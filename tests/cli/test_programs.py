"""`bagpipe train`, `bagpipe data`, …: the programs of a checkout that is installed in development mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bagpipe

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]

#: What the console script does. The library is found, as in a development install; the programs are beside it.
CONSOLE = f"import sys; sys.path.append({str(ROOT)!r}); from bagpipe.cli.main import console; sys.exit(console())"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-P", "-c", CONSOLE, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_the_programs_of_a_development_install_run_anywhere(tmp_path):
    done = run(tmp_path, "data", "synth", "--rows", "10", "--out", "ten.tsv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ten.tsv: 10 rows")


def test_a_package_of_the_user_that_hides_them_is_refused(tmp_path):
    (tmp_path / "data.py").write_text("")
    code = f"import sys; sys.path.insert(0, ''); {CONSOLE}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "cacher", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: expected the package data of the checkout {ROOT}, but Python finds ")
    assert done.stderr.count("\n") == 1


def test_the_table_of_commands_tells_its_version(tmp_path):
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"bagpipe {bagpipe.__version__}\n")
