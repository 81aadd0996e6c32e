"""`make gpu`: the tests of `tests/gpu`, then `benchmarks/gpu`, by an interpreter whose torch sees a CUDA device.

    the interpreter named by PYTHON=; else .venv's, python3's: does its torch see one? ──yes──> it, as it is
                                                               └─ no ─> a card? ──yes──> .venv with CUDA builds
                                                                                └─ no ─> one line, exit 2

An interpreter is used as it is: nothing is installed into it, and it needs little (`NEEDED`). Standard library only.
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

#: Modules without which neither tests nor benchmark run.
NEEDED = ("numpy", "torch", "xxhash", "safetensors", "pytest")

#: For one file of tests, or the benchmark.
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
    """What an interpreter has.

    Attributes:
        python: its path.
        missing: of `NEEDED`.
        sees_device: its torch sees a CUDA device.
        fits: it is Python 3.11 or 3.12.
    """

    python: str
    missing: tuple[str, ...]
    sees_device: bool
    fits: bool

    def problem(self) -> str | None:
        """Why it cannot be used, whatever the device; None: it can."""
        if not self.fits:
            return f"{self.python} is not Python 3.11 or 3.12"
        if self.missing:
            names = " ".join(self.missing)
            return f"{self.python} lacks {names}; fix: {self.python} -m pip install {names}"
        return None


def probe(python: str) -> Finding:
    """Ask an interpreter. One that cannot even answer has nothing."""
    done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Finding(python=python, missing=NEEDED, sees_device=False, fits=True)
    return Finding(
        python=python, missing=tuple(answer["missing"]), sees_device=answer["sees_device"], fits=answer["fits"]
    )


def choose(candidates: Sequence[str], *, rehearse: bool) -> str:
    """The first interpreter that can be used as it is; else a .venv made for the card.

    Raises:
        SystemExit: 2, after one line: there is none, and no card to make one for.
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
    return _made()


def _made() -> str:
    """A .venv with CUDA builds. It need not be whole: tests and benchmark do without torchrec and fbgemm.

    Raises:
        SystemExit: 2, after one line: it cannot be used.
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
    """pytest on the folder's own settings, and without the conftest of the whole suite, which needs its packages.

    Each file in a process of its own: after one wrong access a process can do nothing more on its card.
    """
    folder = ROOT / "tests" / "gpu"
    settings = ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(folder)]
    command = [python, "-m", "pytest", *settings, "-m", "gpu", "-p", "no:cacheprovider"]
    return [[*command, str(path)] for path in sorted(folder.glob("test_*.py"))]


def benchmark_command(python: str, arguments: Sequence[str], *, rehearse: bool) -> list[str]:
    return [python, "-m", "benchmarks.gpu.main", *(["--rehearse"] if rehearse else []), *arguments]


def environment(rehearse: bool) -> Mapping[str, str]:
    """PYTHONPATH is kept: it may be where an interpreter that cannot be written to finds its packages.

    cuBLAS gets a fixed workspace, as in a training job (`trainer.process.settle_device`).
    """
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**workspace, **os.environ, **({"BAGPIPE_GPU_REHEARSAL": "1"} if rehearse else {})}


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Its exit code, 124 where it takes too long: a kernel that never ends must not hold up the rest."""
    try:
        return subprocess.run(command, cwd=ROOT, env=variables, check=False, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Tests on a CUDA device, then the benchmark. Other flags go to the benchmark."
    )
    parser.add_argument("--this-python", action="store_true", help="use the interpreter that runs this, or none")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny sizes: shows that it all runs")
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
