"""`ClockJump`: a wall clock that jumps while programs run. Monotonic clocks and the machine's own clock are
unaffected.

    shared file, 8 bytes: seconds to add ──mapped──> a library between program and libc (LD_PRELOAD)
    test ──jump(86_400)──┘                           gettimeofday, time, clock_gettime(CLOCK_REALTIME): kernel + offset
                                                     deadlines of pthread_cond_timedwait, sem_timedwait: kernel - offset

A Linux time namespace moves only the monotonic and boot-time clocks (time_namespaces(7)), so it does not help. The
library is compiled on first use, which needs a C compiler.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bagpipe.errors import InputError

__all__ = ["ClockJump", "find_compiler"]

_COMPILERS = ("cc", "gcc", "clang")
_OFFSET_VARIABLE = "BAGPIPE_CLOCK_OFFSET"

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BAGPIPE_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = (int)syscall(SYS_clock_gettime, clock, now);
    if (done == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int done = (int)syscall(SYS_gettimeofday, now, zone);
    if (done == 0 && now && offset) now->tv_sec += *offset;
    return done;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

/* The kernel's clock did not jump. A deadline this early is one of a monotonic clock, seconds since the start. */
static struct timespec of_kernel(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (offset && found.tv_sec > 500000000) found.tv_sec -= *offset;
    return found;
}

/* Of x86-64, where an older one has the same name; elsewhere there is only one. */
static void *newest(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = newest("pthread_cond_timedwait");
    struct timespec real = of_kernel(deadline);
    return next(cond, mutex, &real);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = newest("sem_timedwait");
    struct timespec real = of_kernel(deadline);
    return next(semaphore, &real);
}
"""


class ClockJump:
    """Context manager. Programs started with its `environment` see its clock, and all see the same jumps together.

    Args:
        folder: an existing folder for the library and the shared file.

    Raises:
        InputError: on `__enter__`, there is no C compiler, or it fails.
    """

    def __init__(self, folder: Path) -> None:
        self._library = folder / "clock.so"
        self._offset = folder / "clock.offset"

    def __enter__(self) -> Self:
        compiler = find_compiler()
        if compiler is None:
            raise InputError(f"a clock that jumps needs a C compiler: none of {', '.join(_COMPILERS)} is on PATH")
        self.jump(0)
        done = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(self._library)],
            input=_SOURCE,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise InputError(f"{compiler} cannot compile the clock: {' '.join(done.stderr.split())}")
        return self

    def __exit__(self, *_: object) -> None:
        self.jump(0)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment that a program must be started with."""
        return {"LD_PRELOAD": str(self._library), _OFFSET_VARIABLE: str(self._offset)}

    def jump(self, offset_s: int) -> None:
        """Set the error of the wall clock in seconds. Jumps do not add up."""
        # Written in place: programs have the file mapped.
        with self._offset.open("r+b" if self._offset.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", offset_s))


def find_compiler() -> str | None:
    """A C compiler on PATH."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)
