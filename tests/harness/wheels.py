"""The wheel as pip builds it, and an environment of its own in which it is installed.

copy_sources ──> build ──> wheel ──install──> folder with the environment's programs
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from bagpipe.util.programs import PROGRAMS

__all__ = ["build", "copy_sources", "install"]

ROOT = Path(__file__).parents[2]


def copy_sources(folder: Path) -> None:
    """Copy the sources, since building writes next to them."""
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("bagpipe", *PROGRAMS, "tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def build(kind: str, checkout: Path, out: Path) -> Path:
    """A wheel or an sdist of the checkout, made as pip makes it."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=checkout, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    return path


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a new environment, which borrows the packages of this one. Returns the folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=250)
    launcher = folder / "bin/torchrun"
    launcher.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    return folder / "bin"
