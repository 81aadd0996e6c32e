"""`make gpu`: runs tests/gpu, then benchmarks/gpu, with an interpreter whose torch sees a CUDA device.

    PYTHON=, else .venv's, else python3: does its torch see a device? ──yes──> this interpreter, unchanged
                                         └─ no ─> nvidia-smi on PATH? ──yes──> .venv with CUDA builds
                                                                      └─ no ─> one line, exit 2

Nothing is installed into an existing interpreter; it needs only the modules in `NEEDED`. This script uses the standard
library only.
Exit codes: 0 all passed; 1 a test or a part of the benchmark failed; 2 cannot run here (one line says why).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NEEDED", "Finding", "benchmark_command", "main", "pytest_commands"]

ROOT = Path(__file__).resolve().parent.parent
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"

#: Modules that tests and benchmark need.
NEEDED = ("numpy", "torch", "xxhash", "safetensors", "pytest")

#: Timeout of one test file, and of the benchmark.
TIMEOUT_S = 1200

_PROBE = f"""
import importlib.util, json, sys
missing = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
sees_device = False
if "torch" not in missing:
    import torch
    sees_device = torch.cuda.is_available()
fits = (3, 11) <= sys.version_info[:2] < (3, 13)
print(json.dumps({{"missing": missing, "sees_device": sees_device, "fits": fits}}))
"""


@dataclass(frozen=True)
class Finding:
    """The properties of an interpreter.

    Attributes:
        python: its path.
        missing: modules of `NEEDED` that it lacks.
        sees_device: whether its torch sees a CUDA device.
        fits: whether it is Python 3.11 or 3.12.
    """

    python: str
    missing: tuple[str, ...]
    sees_device: bool
    fits: bool

    def problem(self) -> str | None:
        """The reason why it cannot be used on any device. None: it can be used."""
        if not self.fits:
            return f"{self.python} is not Python 3.11 or 3.12"
        if self.missing:
            names = " ".join(self.missing)
            return f"{self.python} lacks {names}; fix: {self.python} -m pip install {names}"
        return None


def probe(python: str) -> Finding:
    """Ask an interpreter. One that does not answer lacks everything."""
    done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Finding(python=python, missing=NEEDED, sees_device=False, fits=True)
    return Finding(
        python=python, missing=tuple(answer["missing"]), sees_device=answer["sees_device"], fits=answer["fits"]
    )


def choose(candidates: Sequence[str], *, rehearse: bool) -> str:
    """The first usable interpreter; else a new .venv with CUDA builds.

    Raises:
        SystemExit: 2, after one line: no interpreter is usable, and there is no CUDA device to make one for.
    """
    found = [probe(python) for python in candidates]
    for finding in found:
        if finding.sees_device or (rehearse and finding.problem() is None):
            problem = finding.problem()
            if problem is not None:
                _give_up(problem)
            return finding.python
    if rehearse:
        _give_up("; ".join(finding.problem() or "" for finding in found))
    if shutil.which("nvidia-smi") is None:
        _give_up("no CUDA device here (torch sees none, and there is no nvidia-smi); ARGS=--rehearse runs on the CPU")
    return _make_venv()


def _make_venv() -> str:
    """A .venv with CUDA builds. It can lack torchrec and fbgemm, which tests and benchmark do not need.

    Raises:
        SystemExit: 2, after one line: the .venv cannot be used.
    """
    command = [sys.executable, str(ROOT / "tools" / "make_venv.py")]
    subprocess.run(command, env={**os.environ, "BAGPIPE_DEVICE": "cuda"}, check=False)
    if not VENV_PYTHON.exists():
        _give_up("there is a card, but no .venv for it could be made")
    finding = probe(str(VENV_PYTHON))
    problem = finding.problem()
    if problem is not None:
        _give_up(problem)
    if not finding.sees_device:
        _give_up("there is a card, but torch does not see it, neither as installed nor in a fresh .venv")
    return finding.python


def _give_up(line: str) -> None:
    print(f"gpu: {line}", file=sys.stderr)
    raise SystemExit(2)


def pytest_commands(python: str) -> list[list[str]]:
    """pytest with the settings of tests/gpu, without the suite's conftest, which needs more packages.

    Each file runs in a process of its own: an illegal memory access ends a process's use of the device.
    """
    folder = ROOT / "tests" / "gpu"
    settings = ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(folder)]
    command = [python, "-m", "pytest", *settings, "-m", "gpu", "-p", "no:cacheprovider"]
    return [[*command, str(path)] for path in sorted(folder.glob("test_*.py"))]


def benchmark_command(python: str, arguments: Sequence[str], *, rehearse: bool) -> list[str]:
    return [python, "-m", "benchmarks.gpu.main", *(["--rehearse"] if rehearse else []), *arguments]


def environment(rehearse: bool) -> Mapping[str, str]:
    """Environment variables of the commands.

    PYTHONPATH is kept: a read-only interpreter can find its packages there. cuBLAS gets a fixed workspace, as in a
    training job (`trainer.process.configure_device`).
    """
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**workspace, **os.environ, **({"BAGPIPE_GPU_REHEARSAL": "1"} if rehearse else {})}


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """The exit code; 124 after `TIMEOUT_S`, so that a kernel that never ends does not stop the rest."""
    try:
        return subprocess.run(command, cwd=ROOT, env=variables, check=False, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Tests on a CUDA device, then the benchmark. Other flags go to the benchmark."
    )
    parser.add_argument("--this-python", action="store_true", help="use only the interpreter that runs this script")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU: shows that everything runs")
    parser.add_argument("--only", choices=("tests", "benchmark"), help="one of the two")
    flags, rest = parser.parse_known_args(argv)
    if rest and flags.only == "tests":
        _give_up(f"{' '.join(rest)}: flags for the benchmark, which --only tests leaves out")
    candidates = [sys.executable]
    if not flags.this_python and VENV_PYTHON.exists():
        candidates.insert(0, str(VENV_PYTHON))
    python = choose(candidates, rehearse=flags.rehearse)
    print(f"gpu: with {python}", flush=True)
    commands = {
        "tests": pytest_commands(python),
        "benchmark": [benchmark_command(python, rest, rehearse=flags.rehearse)],
    }
    failed = []
    for name in commands if flags.only is None else (flags.only,):
        for command in commands[name]:
            code = _run(command, environment(flags.rehearse))
            if code:
                failed.append(f"{command[-1] if name == 'tests' else name} ({code})")
    print(f"gpu: failed: {', '.join(failed)}" if failed else "gpu: all passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
