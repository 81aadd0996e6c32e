"""The lock files are complete, name what pyproject.toml asks for, and have a hash for every pin."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bagpipe.util.environment import RECOMMENDED
from tools import make_locks
from tools.make_locks import DEVICE_NAMES, STEPS, pins
from tools.make_venv import COMMON_LOCKS, DEV_EXTRAS, DEVICE_LOCKS, LOCKS, ROOT, RUN_EXTRAS

FILES = [step.file for step in STEPS]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def versions(*files: str) -> dict[str, str]:
    """Distributions and versions of several files."""
    return {name: pin.partition(" ")[0] for file in files for name, pin in pins(file).items()}


def test_every_file_is_one_of_the_steps():
    assert sorted(path.name for path in LOCKS.iterdir()) == sorted(FILES)
    assert {*COMMON_LOCKS, *DEVICE_LOCKS.values()} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_every_pin_is_exact_and_has_a_sha256(file):
    text = re.sub(r"^\s*#.*\n", "", (LOCKS / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    entries = re.findall(r"^\S.*(?:\n .*)*", text, re.MULTILINE)
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==[^\s*]+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    assert len(entries) == len(pins(file)) > 0


def test_a_distribution_has_one_version_in_all_files():
    seen: dict[str, str] = {}
    for file in FILES:
        for name, version in versions(file).items():
            assert seen.setdefault(name, version) == version, f"{name} in {file}"


def test_only_the_cuda_file_has_builds_for_cuda():
    assert [name for name in pins("cuda.txt") if name.startswith("nvidia-")]
    for file in FILES:
        if file != "cuda.txt":
            assert not list(filter(DEVICE_NAMES.fullmatch, pins(file))), file


def test_the_trio_is_the_recommended_one():
    assert versions("run.txt")["torchrec"] == RECOMMENDED.torchrec
    assert versions("cpu.txt") == {"fbgemm-gpu-cpu": RECOMMENDED.fbgemm}
    cuda = versions("cuda.txt")
    assert (cuda["torch"], cuda["fbgemm-gpu"]) == (RECOMMENDED.torch, RECOMMENDED.fbgemm)


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """Requirements of the library and of extras, with the extras that those name."""
    project = PROJECT["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                found += wanted(tuple(requirement.extras))
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize(
    ("files", "requirements"),
    [
        (("build.txt",), [Requirement(line) for line in PROJECT["build-system"]["requires"]]),
        (("build.txt", "run.txt", "cuda.txt"), wanted(RUN_EXTRAS)),
        ((*COMMON_LOCKS, "cuda.txt"), wanted((*RUN_EXTRAS, *DEV_EXTRAS))),
        ((*COMMON_LOCKS, "cuda.txt", "docs.txt"), wanted(("docs",))),
    ],
    ids=["build", "run", "dev", "docs"],
)
def test_requirements_of_the_project_are_locked(files, requirements):
    """A change of pyproject.toml needs ``make locks``."""
    have = versions(*files)
    wrong = [
        str(item) for item in requirements if not item.specifier.contains(have.get(canonicalize_name(item.name), "0"))
    ]
    assert not wrong


def test_the_locks_name_all_that_the_installed_packages_require():
    """pip is told to resolve nothing, so what a lock lacks would be missing."""
    have = {**versions(*FILES), "fbgemm-gpu": RECOMMENDED.fbgemm}  # torchrec's metadata names it on a CPU too
    wrong = []
    for name in versions(*FILES):
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # of the other device, another platform, or the site
            continue
        for item in map(Requirement, lines):
            if _applies(item.marker) and not item.specifier.contains(have.get(canonicalize_name(item.name), "0")):
                wrong.append(f"{name} requires {item}")
    assert not wrong


def _applies(marker: Marker | None) -> bool:
    return marker is None or marker.evaluate({"extra": ""})


def test_a_failure_leaves_all_files_as_they_were(monkeypatch, tmp_path, capsys):
    def fail_second(command, requirements):
        file = command[command.index("--output-file") + 1]
        Path(file).write_text("without hashes")
        if file.endswith("run.txt"):
            raise subprocess.CalledProcessError(1, command, stderr="no network")

    (tmp_path / "build.txt").write_text("whole")
    monkeypatch.setattr(make_locks, "LOCKS", tmp_path)
    monkeypatch.setattr(make_locks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_locks, "_uv", fail_second)
    assert make_locks.main([]) == 1
    assert capsys.readouterr().err.startswith("no network")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"build.txt": "whole"}
