"""A headless browser for the test of the replay's report: the machine's own, or one that an npm package holds.

    chromium or chrome on PATH ── else ──> .venv/browser/chromium ── else ──> make browser: npm pack ─> unpack

@sparticuz/chromium holds a Chromium for machines that have nothing: compressed, with the libraries and fonts it needs.
Run as ``python -m tools.browser``. Without npm or network it says so and exits 0: the test that needs it is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "browser"
PACKAGE = "@sparticuz/chromium@147.0.0"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")

#: Python's standard library cannot read brotli, node's can.
_UNPACK = "const z=require('zlib'),f=require('fs');const [i,o]=process.argv.slice(1);" + (
    "f.writeFileSync(o,z.brotliDecompressSync(f.readFileSync(i)))"
)

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir></fontconfig>
"""


def find_browser() -> Path | None:
    """The browser to test with, if there is one."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return Path(found)
    ours = FOLDER / "chromium"
    return ours if ours.exists() else None


def environment_of(program: Path) -> dict[str, str]:
    """What the browser is started with: the package's one finds its own libraries and fonts."""
    environment = dict(os.environ)
    if program.parent == FOLDER:
        environment |= {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}
    return environment


def main() -> int:
    found = find_browser()
    if found is None:
        try:
            found = _install()
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            print(f"browser: none here, and none could be fetched ({type(error).__name__}): its test is skipped")
            return 0
    print(f"browser: {found}")
    return 0


def _install() -> Path:
    """Fetch and unpack the package's browser; half of it is never found."""
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        folder = Path(name)
        _run(["npm", "pack", "--silent", "--fetch-retries=0", "--fetch-timeout=60000", PACKAGE], folder)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        ready = folder / "ready"
        ready.mkdir()
        for part in ("al2023.tar", "swiftshader.tar", "fonts.tar"):
            _run(["node", "-e", _UNPACK, f"package/bin/{part}.br", part], folder)
            with tarfile.open(folder / part) as archive:
                archive.extractall(ready, filter="data")
        _run(["node", "-e", _UNPACK, "package/bin/chromium.br", "ready/chromium"], folder)
        (ready / "chromium").chmod(0o755)
        (ready / "fonts.conf").write_text(_FONTS.format(folder=FOLDER / "fonts"), encoding="utf-8")
        shutil.rmtree(FOLDER, ignore_errors=True)
        ready.rename(FOLDER)
    return FOLDER / "chromium"


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
