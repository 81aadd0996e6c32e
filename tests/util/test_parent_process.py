from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

#: A parent that starts a pool of one worker, says the worker's process id, and waits for its own end.
PARENT = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from bagpipe.util.parent_process import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    sys.stdin.read()
"""


def test_a_worker_ends_with_a_killed_parent(tmp_path: Path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert select.select([worker], [], [], 30)[0], "readable once the worker has ended"
        os.close(worker)
