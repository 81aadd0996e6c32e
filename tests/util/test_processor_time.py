from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bagpipe.util.processor_time import children_s, process_s

#: Works for so long, says so, and waits for its end.
WORK = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"


def test_this_process():
    assert process_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)


def test_children_until_they_are_waited_for():
    before_s = children_s()
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert children_s() - before_s >= 0.25
        assert process_s(child.pid) >= 0.25


def test_no_such_process():
    with pytest.raises(OSError, match="No such file"):
        process_s(1 << 22)
