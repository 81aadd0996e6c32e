"""Ways to start a browser, from the most confined to the least; the first one that works is taken.

    as another user than root ──sandbox──> no sandbox ──> as root, no sandbox       each step down has a reason

Chromium refuses its sandbox to root, and the sandbox needs user namespaces, which some containers forbid. That other
user reads few folders, so the page and the browser of `make browser` lie in a temporary one that all users may enter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import make_browser as tool

#: ``nobody`` of Linux. It needs no entry in /etc/passwd.
NOBODY = 65534

#: Moves the pipe's ends to the descriptors that the browser uses, changes the user, then execs the browser.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]  # 3 and 4 may be taken, by each other
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
user = int(sys.argv[3])
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
os.execv(sys.argv[4], sys.argv[4:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a browser is started.

    Attributes:
        user: number of the user.
        sandbox: whether the processes that read pages are in Chromium's sandbox.
    """

    user: int
    sandbox: bool

    def __str__(self) -> str:
        return f"as user {self.user}, {'with' if self.sandbox else 'without'} its sandbox"

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.sandbox else ("--no-sandbox", "--no-zygote")


def ways(user: int) -> tuple[Way, ...]:
    """The ways of a user, the most confined first."""
    if user != 0:
        return Way(user=user, sandbox=True), Way(user=user, sandbox=False)
    return *ways(NOBODY), Way(user=0, sandbox=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A folder that every user may enter, with what the browser may read.

    Attributes:
        pages: the pages under test. profile: what the browser writes. program: the browser.
    """

    pages: Path
    profile: Path
    program: Path

    def give(self, user: int) -> None:
        """An empty profile, which this user may write."""
        shutil.rmtree(self.profile, ignore_errors=True)
        self.profile.mkdir(mode=0o700)
        if user != os.getuid():
            os.chown(self.profile, user, user)


@contextmanager
def room_for(program: Path) -> Iterator[Room]:
    """A `Room`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        if program.parent == tool.FOLDER and os.getuid() == 0:
            program = _copy(program, folder / "browser")
        (folder / "pages").mkdir(mode=0o755)
        yield Room(pages=folder / "pages", profile=folder / "profile", program=program)


def _copy(program: Path, folder: Path) -> Path:
    """The browser of `make browser` in a folder that every user may enter."""
    shutil.copytree(program.parent, folder, copy_function=_link, ignore=shutil.ignore_patterns(tool.FONTS))
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    tool.write_fonts(folder)
    return folder / program.name


def _link(source: str, target: str) -> None:
    """Another name of a file, or a copy on another disk. The browser is 200 MB."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def start(way: Way, room: Room, flags: Sequence[str], ends: tuple[int, int], log: Path) -> subprocess.Popen[bytes]:
    """Start the browser.

    Args:
        ends: the pipe's ends that it reads and writes.
        log: for what it prints.
    """
    room.give(way.user)
    environment = tool.environment_of(room.program) | {"HOME": str(room.profile), "TMPDIR": str(room.profile)}
    command = [str(room.program), *flags, *way.flags, f"--user-data-dir={room.profile}"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, ends), str(way.user), *command],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
