"""`HeldSync`: a disk whose syncs take as long as a test wants.

    test ──hold()──> file "hold" ──exists──> fdatasync waits in a library between server and libc (LD_PRELOAD)
         <──is_waiting── file "waiting" ──made──┘

The library is compiled on first use, which needs a C compiler (`tests.harness.clock.find_compiler`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bagpipe.errors import InputError
from tests.harness.clock import find_compiler

__all__ = ["HeldSync"]

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int file) {
    static int (*next)(int);
    const char *hold = getenv("BAGPIPE_SYNC_HOLD"), *waiting = getenv("BAGPIPE_SYNC_WAITING");
    while (hold && waiting && access(hold, F_OK) == 0) {
        int made = open(waiting, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        if (made >= 0) close(made);
        usleep(2000);
    }
    if (!next) next = dlsym(RTLD_NEXT, "fdatasync");
    return next(file);
}
"""


class HeldSync:
    """Syncs of the programs that start in `applied`.

    Args:
        folder: an existing folder for the library and two marks.

    Raises:
        InputError: there is no C compiler, or it fails.
    """

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler()
        if compiler is None:
            raise InputError("a disk that holds its syncs needs a C compiler")
        library = folder / "sync.so"
        self._hold, self._waiting = folder / "sync.hold", folder / "sync.waiting"
        self._environment = {
            "LD_PRELOAD": str(library),
            "BAGPIPE_SYNC_HOLD": str(self._hold),
            "BAGPIPE_SYNC_WAITING": str(self._waiting),
        }
        done = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"],
            input=_SOURCE,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise InputError(f"{compiler} cannot compile the sync: {' '.join(done.stderr.split())}")

    @property
    def is_waiting(self) -> bool:
        """Whether a program waits for a sync that is held."""
        return self._waiting.exists()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Programs that are started now, by this process, have these syncs."""
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def hold(self) -> None:
        """Let the next syncs wait."""
        self._hold.touch()

    def release(self) -> None:
        """Let all syncs go on."""
        self._hold.unlink(missing_ok=True)
        self._waiting.unlink(missing_ok=True)
