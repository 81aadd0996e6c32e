"""The program of the planner process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

from bagpipe.util.shared_file import open_shared_file


def test_it_imports_no_torch_and_no_optional_package() -> None:
    code = (
        "import sys, bagpipe.lookahead.child\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'google', 'grpc', 'redis'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_ends_without_its_parent_although_the_pipes_are_open() -> None:
    """As where a process that the user started has inherited them."""
    with ExitStack() as stack:
        fds = [*os.pipe(), open_shared_file(4096), open_shared_file(4096)]
        for fd in fds:
            stack.callback(os.close, fd)
        other = os.getppid()
        command = [sys.executable, "-m", "bagpipe.lookahead.child", *map(str, [*fds, other])]
        assert subprocess.run(command, pass_fds=fds, timeout=250).returncode == 0
