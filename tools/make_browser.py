"""Install a headless browser for the tests of the replay's report, unless the machine has one.

    chromium or chrome on PATH (no snap) ── else ──> .venv/browser/chromium ── else ──> make browser: npm pack ─> unpack

The npm package @sparticuz/chromium holds a compressed Chromium with its libraries and fonts.
Run as ``python -m tools.make_browser``. Without npm or network, or where that Chromium does not run (it is built for
Linux on x86-64), it prints so and exits 0: the tests that need a browser are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "browser"
PACKAGE = "@sparticuz/chromium@147.0.0"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")

#: Decompresses brotli with node: Python's standard library cannot.
_UNPACK = "const z=require('zlib'),f=require('fs');const [i,o]=process.argv.slice(1);" + (
    "f.writeFileSync(o,z.brotliDecompressSync(f.readFileSync(i)))"
)

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir></fontconfig>
"""


def find_browser() -> Path | None:
    """The browser to test with. None: there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found and not _is_snap(Path(found)):
            return Path(found)
    ours = FOLDER / "chromium"
    return ours if ours.exists() else None


def _is_snap(program: Path) -> bool:
    """A browser in a snap cannot read /tmp, where the pages are, nor hidden folders. Ubuntu's scripts start snaps."""
    with program.open("rb") as file:
        start = file.read(4096)
    return program.resolve().name == "snap" or (start.startswith(b"#!") and b"/snap/" in start)


def environment_of(program: Path) -> dict[str, str]:
    """Environment of the browser's process, with libraries and fonts of the package's browser."""
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
    """Download and unpack the package's browser. It is moved into place only after it has run once."""
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        folder = Path(name)
        _run(["npm", "pack", "--silent", "--fetch-retries=0", "--fetch-timeout=60000", PACKAGE], folder)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            _extract(archive, folder)
        ready = folder / "ready"
        ready.mkdir()
        for part in ("al2023.tar", "swiftshader.tar", "fonts.tar"):
            _run(["node", "-e", _UNPACK, f"package/bin/{part}.br", part], folder)
            with tarfile.open(folder / part) as archive:
                _extract(archive, ready)
        _run(["node", "-e", _UNPACK, "package/bin/chromium.br", "ready/chromium"], folder)
        (ready / "chromium").chmod(0o755)
        _run([str(ready / "chromium"), "--version"], folder, {"LD_LIBRARY_PATH": str(ready / "lib")})
        (ready / "fonts.conf").write_text(_FONTS.format(folder=FOLDER / "fonts"), encoding="utf-8")
        shutil.rmtree(FOLDER, ignore_errors=True)
        ready.rename(FOLDER)
    return FOLDER / "chromium"


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack. From Python 3.11.4 on, paths outside of `folder` are refused."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)


def _run(command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main())
