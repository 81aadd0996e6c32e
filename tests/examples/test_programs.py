"""The examples run as programs, and print the same numbers without a cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.effort import some_of
from tests.examples.samples import SAMPLES

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("name", some_of([*SAMPLES], {0, 2, 4}))
def test_the_program_prints_losses_and_a_result(name, redis_server, capsys):
    """Two runs in one store: the second deletes the rows of the first."""
    printed = []
    for cache_rows in ("20000", "0"):
        SAMPLES[name].module.main(["--store", redis_server.url, "--steps", "52", "--cache-rows", cache_rows])
        printed.append(capsys.readouterr().out.splitlines())
    cached, direct = printed
    assert cached == direct
    assert [line.split(":")[0] for line in cached[:2]] == ["step 1", "step 51"]
    assert len(cached) >= 3


@pytest.mark.slow  # tests/docs/test_readme.py has such a program
@pytest.mark.multiproc
def test_a_file_is_a_program_of_its_own():
    """With the library on the path, as when it is installed."""
    command = [sys.executable, str(ROOT / "examples" / "two_tower.py"), "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "recall" in done.stdout


def test_the_files_are_short():
    files = [ROOT / "examples" / f"{name.replace('.', '/')}.py" for name in SAMPLES]
    assert not {file.name for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 150}
