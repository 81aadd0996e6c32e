from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from bagpipe.util.priority import BACKGROUND_NICENESS, lower_process_priority, lower_thread_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")


def test_a_thread_lowers_its_own_priority_only() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def lower() -> None:
        lower_thread_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found == [min(19, before + BACKGROUND_NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_process_and_what_it_starts_get_less() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        lower_process_priority(process)
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
        lower_process_priority(process)
        lower_process_priority(process)
        lower_process_priority(process)
        lower_process_priority(process)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19, "the lowest there is"
        process.kill()
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
    lower_process_priority(process)  # has ended: nothing happens
