"""Decisions of the set-up script. Every run of the suite shows that it installs a working environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import make_venv

SCRIPT = Path(make_venv.__file__)


@pytest.mark.parametrize(
    ("variable", "tool", "device"),
    [
        ("", None, "cpu"),
        ("", "/usr/bin/nvidia-smi", "cuda"),
        ("cpu", "/usr/bin/nvidia-smi", "cpu"),
        ("cuda", None, "cuda"),
    ],
)
def test_the_device_is_given_or_detected(monkeypatch, variable, tool, device):
    monkeypatch.setenv("BAGPIPE_DEVICE", variable)
    monkeypatch.setattr(make_venv.shutil, "which", lambda name: tool)
    assert make_venv.choose_device() == device


def test_an_unknown_device_is_refused(monkeypatch):
    monkeypatch.setenv("BAGPIPE_DEVICE", "tpu")
    with pytest.raises(make_venv.SetupError, match="must be cpu or cuda, got 'tpu'"):
        make_venv.choose_device()


def test_the_stamp_covers_every_input(monkeypatch, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("2")
    monkeypatch.setattr(make_venv, "INPUTS", (first, second))
    seen = [make_venv.stamp_of("cpu"), make_venv.stamp_of("cuda")]
    first.write_text("12")
    seen.append(make_venv.stamp_of("cpu"))
    second.write_text("")
    seen.append(make_venv.stamp_of("cpu"))
    assert len({tuple(stamp.items()) for stamp in seen}) == len(seen)


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_a_missing_or_broken_stamp_means_not_ready(monkeypatch, tmp_path, content):
    monkeypatch.setattr(make_venv, "STAMP", tmp_path / "stamp.json")
    if content is not None:
        (tmp_path / "stamp.json").write_text(content)
    assert make_venv.read_stamp() is None


def test_torch_and_torchrec_are_not_left_to_pip():
    wanted = make_venv.requirements()
    assert not [item for item in wanted if item.startswith(("torch>", "torch=", "torchrec", "fbgemm"))]
    assert [item for item in wanted if item.startswith("numpy")]


def test_the_script_runs_on_the_standard_library_alone():
    """A bare machine has no other packages. The environment given here is wrong, so the script installs nothing."""
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT)], env={"BAGPIPE_DEVICE": "tpu"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "make_venv: BAGPIPE_DEVICE must be cpu or cuda, got 'tpu'\n")


def test_every_input_exists():
    assert [path for path in make_venv.INPUTS if not path.is_file()] == []
