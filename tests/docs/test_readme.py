"""The README stays short, its example runs, and its install versions match the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bagpipe.util.environment import install_commands
from tests.docs.pages import ROOT, blocks, read

MAX_WORDS = 900
MAX_EXAMPLE_LINES = 30


def test_the_readme_is_short():
    assert len(read("README.md").split()) <= MAX_WORDS


@pytest.mark.redis
def test_the_example_runs_as_a_script_outside_the_checkout(tmp_path):
    (example,) = blocks("README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= MAX_EXAMPLE_LINES
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last < 0.9 * first


def test_the_swap_is_two_lines():
    (swap,) = blocks("README.md", "diff")
    before, after = swap.splitlines()
    assert before.replace("TrainPipelineSparseDist", "bagpipe.TrainPipeline")[1:] == after[1:]


def test_the_install_commands_are_the_environments():
    (install,) = (block for block in blocks("README.md") if "pip install" in block)
    lines = [line.partition("#")[0].strip() for line in install.splitlines()]
    cpu, cuda = install_commands("cpu"), install_commands("cuda")
    assert lines == [*cpu[:-1], *cuda, 'pip install ".[train,programs]"']
    assert cpu[-1] == cuda[-1]
