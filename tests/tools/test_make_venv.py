"""Decisions of the set-up script. Every run of the suite shows that it installs a working environment."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import MappingProxyType

import pytest

from bagpipe.util.environment import RECOMMENDED
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


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """A folder of locks and wheels in place of the real ones. What is installed goes to its folder `out`."""
    monkeypatch.setattr(make_venv, "ROOT", tmp_path)
    monkeypatch.setattr(make_venv, "LOCKS", tmp_path)
    monkeypatch.setattr(make_venv, "VENV", Path(sys.prefix))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "out"))
    return tmp_path


def write_wheel(folder: Path, content: str) -> str:
    """A wheel of a distribution of one module. Returns its sha256."""
    folder.mkdir(parents=True)
    file = folder / "pinned_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pinned_thing.py", content)
        archive.writestr(
            "pinned_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            "pinned_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("pinned_thing-1.0.dist-info/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_locked_wheel_is_installed(locks, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(locks / "wheels"))
    right = write_wheel(locks / "wheels", "value = 1\n")
    (locks / "run.txt").write_text(f"pinned-thing==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{right}\n")
    make_venv.install_locked("run.txt")
    assert (locks / "out" / "pinned_thing.py").read_text() == "value = 1\n"


def test_a_wheel_with_another_hash_is_refused_in_one_line(locks, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(locks / "wheels"))
    write_wheel(locks / "wheels", "value = 2\n")
    (locks / "run.txt").write_text(f"pinned-thing==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(
        make_venv.SetupError, match=r"run\.txt: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
    ) as caught:
        make_venv.install_locked("run.txt")
    assert "\n" not in str(caught.value)
    assert not (locks / "out").exists()


def test_a_pin_without_a_hash_is_refused(locks, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(locks / "wheels"))
    write_wheel(locks / "wheels", "value = 3\n")
    (locks / "run.txt").write_text("pinned-thing==1.0\n")
    with pytest.raises(make_venv.SetupError, match="ERROR: Hashes are required in --require-hashes mode"):
        make_venv.install_locked("run.txt")
    assert not (locks / "out").exists()


def test_torch_comes_from_one_index_at_a_time(monkeypatch):
    calls = []

    def refuse(arguments, *, quiet=False, environment=MappingProxyType({})):
        calls.append((arguments, dict(environment)))
        raise make_venv.SetupError("no such version")

    monkeypatch.setattr(make_venv, "pip_install", refuse)
    with pytest.raises(make_venv.SetupError):
        make_venv.install_torch()
    build, index = ["--no-deps", f"torch=={RECOMMENDED.torch}+cpu"], make_venv.PYTORCH_CPU_INDEX
    assert calls == [(build, {}), (["--index-url", index, *build], {"PIP_EXTRA_INDEX_URL": index})]


def test_further_indexes_of_pips_configuration_are_not_asked_for_torch(locks, monkeypatch):
    write_wheel(locks / "other" / "pinned-thing", "value = 4\n")
    (locks / "one").mkdir()
    one, other = ((locks / name).as_uri() for name in ("one", "other"))
    (locks / "pip.conf").write_text(f"[global]\nextra-index-url = {other}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(locks / "pip.conf"))
    monkeypatch.delenv("PIP_NO_INDEX")
    wheel = "pinned_thing-1.0-py3-none-any.whl"
    (locks / "other" / "pinned-thing" / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel}">{wheel}</a>')
    arguments = ["--index-url", one, "pinned-thing==1.0"]
    with pytest.raises(make_venv.SetupError, match="No matching distribution found for pinned-thing"):
        make_venv.pip_install(arguments, quiet=True, environment={"PIP_EXTRA_INDEX_URL": one})
    make_venv.pip_install(arguments)  # the other index answers if it is asked
    assert (locks / "out" / "pinned_thing.py").read_text() == "value = 4\n"


def test_no_command_has_a_second_index():
    """With two indexes pip takes the higher version of a name, whoever has put it there."""
    wrong = []
    for pattern in (
        "*.md",
        "Makefile",
        "bagpipe/**/*.py",
        "deploy/**/*",
        "docs/**/*.md",
        "examples/**/*",
        "tools/*.py",
    ):
        for path in filter(Path.is_file, make_venv.ROOT.glob(pattern)):
            if re.search(r"pip.*--extra-index-url", path.read_text(encoding="utf-8", errors="replace")):
                wrong.append(path)
    assert not wrong


def test_the_script_runs_on_the_standard_library_alone():
    """A bare machine has no other packages. The environment given here is wrong, so the script installs nothing."""
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT)], env={"BAGPIPE_DEVICE": "tpu"}, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (1, "make_venv: BAGPIPE_DEVICE must be cpu or cuda, got 'tpu'\n")


def test_every_input_exists():
    assert [path for path in make_venv.INPUTS if not path.is_file()] == []
