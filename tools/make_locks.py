"""Write the lock files of tools/locks: exact versions, and the sha256 of every file that PyPI has of them.

    pyproject.toml, the trio ──> uv pip compile --universal --generate-hashes ─┬─> build.txt   what builds the wheel
    (bagpipe/util/environment.py)                                              ├─> run.txt     library and programs
                                                                               ├─> dev.txt     tests and linters
                                                                               ├─> cpu.txt     fbgemm's CPU build
                                                                               ├─> cuda.txt    CUDA builds, libraries
                                                                               └─> docs.txt    the site

Run as ``make locks``. pip takes several of the files in one call. Each serves every platform and Python. torch's CPU
build is in none of them, since PyPI does not have it.

Versions stay as they are in the files unless uv is told otherwise: ``make locks ARGS="--upgrade"`` moves all of them,
``make locks ARGS="--upgrade-package redis"`` one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bagpipe.util.environment import FBGEMM_NAMES, RECOMMENDED
from tools.make_venv import DEV_EXTRAS, LOCKS, ROOT, RUN_EXTRAS

__all__ = ["STEPS", "Step", "main", "pins"]

#: As PyPI has them: builds for CUDA. torchrec's metadata asks for fbgemm-gpu, never for fbgemm-gpu-cpu.
TRIO = (
    f"torch=={RECOMMENDED.torch}",
    f"{FBGEMM_NAMES['cuda']}=={RECOMMENDED.fbgemm}",
    f"torchrec=={RECOMMENDED.torchrec}",
)

#: Names of what a CUDA environment alone has.
DEVICE_NAMES = re.compile(r"(torch|fbgemm-gpu|cuda-.*|nvidia-.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of uv, which writes one file.

    Attributes:
        file: name of the lock file. It has the versions of earlier steps, and leaves out what those have written.
        extras: those of pyproject.toml to resolve, with the library's own dependencies. Empty: neither.
        requirements: further requirements.
        device: whether the file keeps `DEVICE_NAMES`.
        python: the oldest Python to resolve for.
    """

    file: str
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    device: bool = False
    python: str = "3.11"


def _build_requires() -> tuple[str, ...]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return tuple(project["build-system"]["requires"])


STEPS = (
    Step(file="build.txt", requirements=_build_requires()),
    Step(file="run.txt", extras=RUN_EXTRAS, requirements=TRIO),
    Step(file="dev.txt", extras=(*RUN_EXTRAS, *DEV_EXTRAS), requirements=TRIO),
    Step(file="cpu.txt", requirements=(f"{FBGEMM_NAMES['cpu']}=={RECOMMENDED.fbgemm}",), device=True),
    Step(file="cuda.txt", requirements=TRIO, device=True),
    Step(file="docs.txt", extras=("docs",), requirements=TRIO, python="3.11.5"),  # pymdown-extensions needs that one
)


def main(arguments: Sequence[str]) -> int:
    LOCKS.mkdir(exist_ok=True)
    try:
        with _restored_on_error([LOCKS / step.file for step in STEPS]):
            for number, step in enumerate(STEPS):
                _compile(step, [before.file for before in STEPS[:number]], arguments)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        print("make_locks: uv could not resolve the requirements", file=sys.stderr)
        return 1
    print(f"make_locks: {', '.join(step.file for step in STEPS)} in {LOCKS.relative_to(ROOT)}")
    return 0


@contextmanager
def _restored_on_error(files: Sequence[Path]) -> Iterator[None]:
    """The files get their contents back if the block fails: half a set of locks is of no use."""
    before = {file: file.read_bytes() for file in files if file.exists()}
    try:
        yield
    except BaseException:
        for file in files:
            if file in before:
                file.write_bytes(before[file])
            else:
                file.unlink(missing_ok=True)
        raise


def pins(file: str) -> dict[str, str]:
    """Distributions of a lock file: version, and the marker if there is one."""
    text = (LOCKS / file).read_text(encoding="utf-8")
    return {name: pin.rstrip("\\ ") for name, pin in re.findall(r"^([a-z0-9-]+)==(.*)$", text, re.MULTILINE)}


def _compile(step: Step, earlier: Sequence[str], arguments: Sequence[str]) -> None:
    """Write a file twice: whole, to see what other files hold already, then without that and with hashes."""
    command = ["--python-version", step.python, "--universal", "--only-binary", ":all:"]
    command += ["--output-file", _path(step.file), *_each("--constraints", map(_path, earlier)), *arguments]
    if step.extras:
        command += [*_each("--extra", step.extras), "pyproject.toml"]
    _uv([*command, "-"], step.requirements)
    known = {name: pin for file in earlier for name, pin in pins(file).items()}
    whole = pins(step.file)
    # With another marker, an earlier file may lack it where this one needs it.
    left_out = [name for name, pin in whole.items() if known.get(name) == pin]
    left_out += [name for name in whole if not step.device and DEVICE_NAMES.fullmatch(name)]
    command += ["--generate-hashes", "--custom-compile-command", "make locks", *_each("--no-emit-package", left_out)]
    _uv([*command, "-"], step.requirements)


def _path(file: str) -> str:
    return str((LOCKS / file).relative_to(ROOT))  # the files name each other: no path of this machine


def _each(option: str, values: Iterable[str]) -> Iterator[str]:
    for value in values:
        yield from (option, value)


def _uv(command: Sequence[str], requirements: Sequence[str]) -> None:
    """Run ``uv pip compile``. It asks PyPI alone, whatever index is configured here.

    Raises:
        subprocess.CalledProcessError: with uv's message.
    """
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--no-python-downloads", "--quiet", *command],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("UV_")},
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
