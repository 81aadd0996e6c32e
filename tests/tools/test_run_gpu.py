"""`make gpu`: its choice of interpreter, and its one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_gpu
from tools.run_gpu import Finding

ROOT = Path(__file__).parents[2]


def finding(python: str, *, missing: tuple[str, ...] = (), sees_device: bool = False, fits: bool = True) -> Finding:
    return Finding(python=python, missing=missing, sees_device=sees_device, fits=fits)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Packages of the interpreters by name, without a visible GPU."""
    known: dict[str, Finding] = {}
    monkeypatch.setattr(run_gpu, "probe", known.__getitem__)
    monkeypatch.setattr(run_gpu.shutil, "which", lambda name: None)
    return known


def test_the_first_interpreter_with_a_device_is_used(probes: dict[str, Finding]) -> None:
    probes.update(venv=finding("venv"), base=finding("base", sees_device=True))
    assert run_gpu.choose(["venv", "base"], rehearse=False) == "base"


def test_a_rehearsal_takes_the_first_complete_interpreter(probes: dict[str, Finding]) -> None:
    probes.update(bare=finding("bare", missing=("torch",)), base=finding("base"))
    assert run_gpu.choose(["bare", "base"], rehearse=True) == "base"


@pytest.mark.parametrize(
    ("found", "rehearse", "line"),
    [
        (finding("p"), False, "gpu: no CUDA device here"),
        (
            finding("p", missing=("xxhash",), sees_device=True),
            False,
            "gpu: p lacks xxhash; fix: p -m pip install xxhash",
        ),
        (finding("p", sees_device=True, fits=False), False, "gpu: p is not Python 3.11 or 3.12"),
        (finding("p", missing=("torch", "numpy")), True, "gpu: p lacks torch numpy"),
    ],
)
def test_missing_packages_are_one_line(
    probes: dict[str, Finding], capsys: pytest.CaptureFixture[str], found: Finding, rehearse: bool, line: str
) -> None:
    probes["p"] = found
    with pytest.raises(SystemExit) as end:
        run_gpu.choose(["p"], rehearse=rehearse)
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (finding(str(run_gpu.VENV_PYTHON), sees_device=True), None),
        (finding(str(run_gpu.VENV_PYTHON)), "gpu: there is a card, but torch does not see it"),
        (
            finding(str(run_gpu.VENV_PYTHON), missing=("xxhash",), sees_device=True),
            f"gpu: {run_gpu.VENV_PYTHON} lacks xxhash",
        ),
    ],
)
def test_a_venv_without_torchrec_is_sufficient(
    probes: dict[str, Finding],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    made: Finding,
    line: str | None,
) -> None:
    """`tools/make_venv.py` fails if a package of the trio does not load."""
    probes.update(base=finding("base"))
    probes[made.python] = made
    monkeypatch.setattr(run_gpu.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(run_gpu.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    if line is None:
        assert run_gpu.choose(["base"], rehearse=False) == made.python
        return
    with pytest.raises(SystemExit) as end:
        run_gpu.choose(["base"], rehearse=False)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(line)


def test_flags_for_a_benchmark_that_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_gpu.main(["--rehearse", "--only", "tests", "--parts", "kernels"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "gpu: --parts kernels: flags for the benchmark, which --only tests leaves out\n"


def test_pytest_needs_no_plugin() -> None:
    """The folder's settings are self-contained: collection works without the plugins of the development environment."""
    (command,) = [found for found in run_gpu.pytest_commands(sys.executable) if found[-1].endswith("test_jobs.py")]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "BAGPIPE_GPU_REHEARSAL": "1"}
    done = subprocess.run(
        [*command, "--collect-only", "-q"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/gpu/test_jobs.py" in done.stdout
