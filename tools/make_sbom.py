"""Write the software bill of materials: ``python -m tools.make_sbom [--out FILE]``, or ``make sbom``.

    pyproject.toml with the version ┐
    .venv (what is installed)       ┴── cyclonedx-py environment ──> dist/bagpipe-VERSION.cdx.json

CycloneDX JSON, checked against its schema before it is written: this project, every installed distribution with
version, licence and address, and who requires whom. The same environment gives the same file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import bagpipe
from tools.make_venv import ROOT

__all__ = ["OUT", "main", "with_version", "write"]

OUT = ROOT / "dist" / f"bagpipe-{bagpipe.__version__}.cdx.json"

_DYNAMIC = 'dynamic = ["version"]'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.make_sbom", description="Write the bill of materials.")
    parser.add_argument("--out", type=Path, default=OUT, help="the file (dist/bagpipe-VERSION.cdx.json)")
    out: Path = parser.parse_args().out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    code = write(out)
    if code == 0:
        print(f"make_sbom: {out}")
    return code


def write(out: Path, *, checked: bool = True) -> int:
    """Write the file. Returns the tool's exit code.

    Args:
        checked: compare with the schema first, which takes most of the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        project.write_text(with_version((ROOT / "pyproject.toml").read_text(encoding="utf-8")), encoding="utf-8")
        command = ["environment", "--pyproject", str(project), "--mc-type", "library", "--output-reproducible"]
        command += ["--output-format", "JSON", "--output-file", str(out)]
        command += ["--validate" if checked else "--no-validate", sys.executable]
        return subprocess.run([sys.executable, "-m", "cyclonedx_py", *command], cwd=ROOT, check=False).returncode


def with_version(project: str) -> str:
    """pyproject.toml with the version in it: cyclonedx-py does not ask the build backend for it."""
    if project.count(_DYNAMIC) != 1:
        raise ValueError(f"pyproject.toml: expected one line {_DYNAMIC}")
    return project.replace(_DYNAMIC, f'version = "{bagpipe.__version__}"')


if __name__ == "__main__":
    sys.exit(main())
