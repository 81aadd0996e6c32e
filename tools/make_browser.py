"""Install a headless browser for the tests of the replay's report, unless the machine has one.

    chromium or chrome on PATH (no snap) ── else ──> .venv/browser/chromium
                                                     └─ else ──> make browser: npm pack ─> sha512 ─> unpack

The npm package @sparticuz/chromium holds a compressed Chromium with its libraries and fonts. An archive with another
sha512 than the published one is an error, and nothing of it is unpacked.
Run as ``python -m tools.make_browser``. Without npm or network, or where that Chromium does not run (it is built for
Linux on x86-64), it prints so and exits 0: the tests that need a browser are skipped.
"""

from __future__ import annotations

import base64
import hashlib
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
FONTS = "fonts.conf"  # beside a browser of the package
PACKAGE = "@sparticuz/chromium@147.0.0"
#: Of the package's archive, as npm publishes it: ``npm view @sparticuz/chromium@147.0.0 dist.integrity``.
INTEGRITY = "sha512-4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")

#: Decompresses brotli with node: Python's standard library cannot.
_UNPACK = "const z=require('zlib'),f=require('fs');const [i,o]=process.argv.slice(1);" + (
    "f.writeFileSync(o,z.brotliDecompressSync(f.readFileSync(i)))"
)

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir></fontconfig>
"""


class WrongPackageError(Exception):
    """The archive is not the one that was published. The message is one line."""


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
    folder = program.parent
    if (folder / FONTS).exists():
        environment |= {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / FONTS)}
    return environment


def write_fonts(folder: Path, place: Path | None = None) -> None:
    """Write the list of fonts beside a browser.

    Args:
        folder: of the browser.
        place: where it will be; None: it stays.
    """
    (folder / FONTS).write_text(_FONTS.format(folder=(place or folder) / "fonts"), encoding="utf-8")


def main() -> int:
    found = find_browser()
    if found is None:
        try:
            found = _install()
        except WrongPackageError as error:
            print(f"browser: {error}; it is neither unpacked nor run", file=sys.stderr)
            return 1
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            print(f"browser: none here, and none could be fetched ({type(error).__name__}): its test is skipped")
            return 0
    print(f"browser: {found}")
    return 0


def _install() -> Path:
    """Download and unpack the package's browser. It is moved into place only after it has run once."""
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        folder = Path(name)
        patience = ("--fetch-retries=0", "--fetch-timeout=60000")
        _run(["npm", "pack", "--silent", "--ignore-scripts", *patience, PACKAGE], folder)
        package = next(folder.glob("*.tgz"))
        check(package)
        with tarfile.open(package) as archive:
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
        write_fonts(ready, FOLDER)
        shutil.rmtree(FOLDER, ignore_errors=True)
        ready.rename(FOLDER)
    return FOLDER / "chromium"


def check(package: Path) -> None:
    """Compare the package's archive with `INTEGRITY`.

    Raises:
        WrongPackageError: it is another one.
    """
    with package.open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    found = f"sha512-{base64.b64encode(digest).decode()}"
    if found != INTEGRITY:
        raise WrongPackageError(f"{PACKAGE}: expected {INTEGRITY}, got {found}")


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack. From Python 3.11.4 on, paths outside of `folder` are refused."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)


def _run(command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main())
