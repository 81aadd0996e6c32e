"""Make the development environment: .venv with a working torch/fbgemm/torchrec trio and pinned tools.

    pyproject.toml              ┐          the same as in .venv/stamp.json: done
    tools/locks (which packages)├─ digest ─┤
    bagpipe/util/environment.py ┘          else: venv ─> torch's CPU build ─> the locked packages ─> does the trio load?

Uses the standard library only, so the system's Python can run it. ``nvidia-smi`` on PATH selects CUDA builds, else CPU
builds; ``BAGPIPE_DEVICE=cpu`` or ``cuda`` overrides that. Packages come from pip's configured sources, as wheels whose
sha256 is in tools/locks.

torch's CPU build is not on PyPI, so it is in no lock: it comes by its exact version, from pip's configured sources, or
else from the PyTorch index alone. PyPI takes no version with ``+cpu``, so nobody can put another one there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for bagpipe.util.environment, which imports the standard library only

from bagpipe.util.environment import FBGEMM_NAMES, RECOMMENDED  # noqa: E402 (after the path it needs)

VENV = ROOT / ".venv"
STAMP = VENV / "stamp.json"
LOCKS = ROOT / "tools" / "locks"
RUN_EXTRAS = ("train", "programs")  # of pyproject.toml: those in run.txt
DEV_EXTRAS = ("dev",)
DEVICE_LOCKS = {"cpu": "cpu.txt", "cuda": "cuda.txt"}
COMMON_LOCKS = ("build.txt", "run.txt", "dev.txt")
INPUTS = (
    ROOT / "pyproject.toml",
    ROOT / "bagpipe" / "util" / "environment.py",
    Path(__file__).resolve(),
    *(LOCKS / name for name in (*COMMON_LOCKS, *DEVICE_LOCKS.values())),
)

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 13)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

#: Short timeout and few retries: on an offline machine pip fails quickly.
PIP_PATIENCE = ("--timeout", "20", "--retries", "2")


class SetupError(Exception):
    """The environment cannot be made. The message is one line."""


def main() -> int:
    try:
        # Of two concurrent `make` the second waits for the first and finds the work done.
        with Path(__file__).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            device = choose_device()
            wanted = stamp_of(device)
            if read_stamp() == wanted and (VENV / "bin" / "python").exists():
                STAMP.touch()
                return 0
            make_venv(device)
            STAMP.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            say(f"ready: {VENV} ({device})")
    except SetupError as error:
        print(f"make_venv: {error}", file=sys.stderr)
        return 1
    return 0


def choose_device() -> str:
    """``cpu`` or ``cuda``: which builds to install."""
    device = os.environ.get("BAGPIPE_DEVICE") or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if device not in FBGEMM_NAMES:
        raise SetupError(f"BAGPIPE_DEVICE must be {' or '.join(FBGEMM_NAMES)}, got {device!r}")
    return device


def stamp_of(device: str) -> dict[str, str]:
    """Device and digest of all inputs. Equal stamps mean equal environments."""
    digest = hashlib.sha256()
    for path in INPUTS:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return {"device": device, "inputs": digest.hexdigest()}


def read_stamp() -> dict[str, str] | None:
    try:
        value = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def make_venv(device: str) -> None:
    """Create .venv, or update the existing one."""
    if not PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW:
        raise SetupError(f"Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12")
    STAMP.unlink(missing_ok=True)
    if not venv_python_fits():
        say(f"creating {VENV} with Python {sys.version.split()[0]}")
        done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
        if done.returncode != 0:
            raise SetupError(f"python -m venv failed (on Debian: apt install python3-venv): {last_line(done)}")
    remove_other_flavour(device)
    if device == "cpu":
        install_torch()
    say(f"installing the locked packages ({device})")
    install_locked(*COMMON_LOCKS, DEVICE_LOCKS[device])
    say("checking that torch, fbgemm and torchrec load together")
    code = f"from bagpipe.util.environment import check_environment as check; check({device!r}); import torchrec"
    done = venv_run(["-W", "ignore", "-c", code])
    if done.returncode != 0:
        raise SetupError(f"the installed trio does not load: {last_line(done)}")


def venv_python_fits() -> bool:
    """Whether .venv holds a supported Python with pip."""
    if not (VENV / "bin" / "python").exists():
        return False
    done = venv_run(["-c", "import sys, pip; print(*sys.version_info[:2])"])
    if done.returncode != 0:
        return False
    major, minor = done.stdout.split()
    return PYTHON_FROM <= (int(major), int(minor)) < PYTHON_BELOW


def remove_other_flavour(device: str) -> None:
    """Uninstall the other device's builds: both fbgemm wheels, and both torch builds, write the same files."""
    done = venv_run(["-m", "pip", "list", "--format", "json"])
    have = {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(done.stdout or "[]")}
    unwanted = [name for flavour, name in FBGEMM_NAMES.items() if flavour != device and name in have]
    if "torch" in have and ("+cpu" in have["torch"]) != (device == "cpu"):
        unwanted.append("torch")
    if unwanted:
        say(f"removing {', '.join(unwanted)}")
        venv_run(["-m", "pip", "uninstall", "--yes", *unwanted])


def install_torch() -> None:
    """Install the pinned CPU build of torch from pip's configured sources; if that fails, from the PyTorch index.

    Its dependencies are in the locks. The second index takes the first one's place: with two, either could answer for
    any name.
    """
    say(f"installing torch {RECOMMENDED.torch} (cpu)")
    build = ["--no-deps", f"torch=={RECOMMENDED.torch}+cpu"]
    try:
        pip_install(build, quiet=True)
    except SetupError:
        # The variable replaces further indexes of pip's configuration files, which the option would leave.
        alone = {"PIP_EXTRA_INDEX_URL": PYTORCH_CPU_INDEX}
        pip_install(["--index-url", PYTORCH_CPU_INDEX, *build], environment=alone)


def install_locked(*names: str) -> None:
    """Install lock files: wheels only, each with one of its sha256. A lock is complete, so pip resolves nothing."""
    files = [word for name in names for word in ("--requirement", str((LOCKS / name).relative_to(ROOT)))]
    pip_install(["--require-hashes", "--no-deps", "--only-binary", ":all:", *files])


def pip_install(
    arguments: Sequence[str], *, quiet: bool = False, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    # Python compiles what it imports, a fifth of the files; pip would compile all, on one core.
    options = ["--no-compile", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command = ["-m", "pip", "install", *options]
    done = venv_run([*command, *PIP_PATIENCE, *arguments], environment)
    if done.returncode == 0:
        return
    if not quiet:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
    raise SetupError(f"pip install {' '.join(arguments)}: {last_line(done)}")


def venv_run(
    arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    command = [str(VENV / "bin" / "python"), *arguments]
    # Another project's packages must not leak in. What is compiled to check the trio is kept.
    whole = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", **environment}
    return subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-1]


def say(text: str) -> None:
    print(f"make_venv: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
