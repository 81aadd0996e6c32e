"""Build the documentation site: ``python -m tools.make_docs [--out FOLDER]``.

    pyproject (extra `docs`), tools/locks/docs.txt ──pip──> .venv ──mkdocs build --strict──> site/

Only `make docs` needs these packages, so the set-up of the other targets leaves them out. Warnings are errors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version

from tools.make_venv import ROOT, SetupError, install_locked

SITE = ROOT / "site"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.make_docs", description="Build the documentation site.")
    parser.add_argument("--out", default=str(SITE), help="folder of the site (%(default)s)")
    options = parser.parse_args()
    try:
        install(requirements())
    except SetupError as error:
        print(f"make_docs: {error}", file=sys.stderr)
        return 1
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", options.out]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode == 0:
        print(f"make_docs: {options.out}/index.html")
    return done.returncode


def requirements() -> list[str]:
    """The packages of the extra `docs`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted: list[str] = project["optional-dependencies"]["docs"]
    return wanted


def install(wanted: list[str]) -> None:
    """Install the locked packages if this interpreter lacks one of those wanted."""
    if not all(is_installed(item.partition("[")[0]) for item in wanted):
        install_locked("docs.txt")


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
