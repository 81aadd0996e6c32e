"""The commands of README, docs and examples run, in the order of each page, in a fresh folder: `make docs-commands`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.page_script import COMMAND_PAGES, page_script, table
from tests.docs.pages import ROOT, command_blocks
from tests.harness.wheels import build, copy_sources, install

#: Pages with commands that run here.
PAGES = [page for page in COMMAND_PAGES if "printf" in page_script(page)]

#: Seconds for the commands of one page.
TIMEOUT_S = 3000


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: paths of unix sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="page-") as name:
        yield Path(name)


def copy_checkout(folder: Path) -> None:
    """Copy the files of a clone, and link the environment."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=250).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)


def run_script(text: str, folder: Path, programs: Path) -> None:
    """Run a script with the programs of a folder. Asserts that it ends with 0."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CHECKOUT": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):  # of a script that has ended nothing is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(0)
            shown = log.read()
            sys.stdout.write(shown)
    assert code == 0, "\n".join(shown.splitlines()[-20:])


@pytest.mark.parametrize("kind", table())
def test_every_entry_names_a_command(kind: str) -> None:
    for page, found in table()[kind].items():
        commands = [command for block in command_blocks(page) for command in block]
        for name in found:
            has = [name in command if kind == "words" else command.startswith(name) for command in commands]
            assert any(has), f"{page} has no command with {name}"


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.timeout(TIMEOUT_S + 100)
@pytest.mark.parametrize("page", PAGES)
def test_in_a_checkout(page: str, folder: Path) -> None:
    copy_checkout(folder)
    run_script(page_script(page), folder, Path(sys.prefix) / "bin")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an installed wheel."""
    made = tmp_path_factory.mktemp("wheel")
    for name in ("checkout", "out"):
        (made / name).mkdir()
    copy_sources(made / "checkout")
    return install(build("wheel", made / "checkout", made / "out"), made / "environment")


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.timeout(TIMEOUT_S + 100)
@pytest.mark.parametrize("page", [page for page in PAGES if "bagpipe " in page_script(page, of_wheel=True)])
def test_from_the_wheel(page: str, folder: Path, programs: Path) -> None:
    """With the configurations of a checkout, and nothing else of it."""
    shutil.copytree(ROOT / "trainer/configs", folder / "trainer/configs")
    run_script(page_script(page, of_wheel=True), folder, programs)
