"""The README stays short, its example runs, and its install versions match the environment."""

from __future__ import annotations

import subprocess
import sys

from bagpipe.util.environment import RECOMMENDED
from tests.docs.pages import ROOT, blocks, read

MAX_WORDS = 900
MAX_EXAMPLE_LINES = 10


def test_the_readme_is_short():
    assert len(read("README.md").split()) <= MAX_WORDS


def test_the_example_runs_and_the_cache_changes_nothing(tmp_path):
    (example,) = blocks("README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= MAX_EXAMPLE_LINES
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    (direct_hits, *direct), (cached_hits, *cached) = (line.split() for line in done.stdout.splitlines())
    assert float(direct_hits) == 0.0 < float(cached_hits)
    assert len(direct) == 2
    assert direct == cached


def test_the_versions_are_the_environments():
    (install,) = (block for block in blocks("README.md") if "pip install" in block)
    trio = RECOMMENDED
    for requirement in (f"torch=={trio.torch}", f"fbgemm-gpu-cpu=={trio.fbgemm}", f"fbgemm-gpu=={trio.fbgemm}"):
        assert requirement in install
    assert f"torchrec=={trio.torchrec}" in install
