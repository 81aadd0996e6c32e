from __future__ import annotations

import os
import signal
import threading

import pytest

from bagpipe.util.lasting_thread import in_lasting_thread


def _name() -> str:
    return threading.current_thread().name


def test_all_calls_are_made_in_one_thread_that_stays() -> None:
    found: list[int] = []
    for _ in range(2):
        caller = threading.Thread(target=lambda: found.append(in_lasting_thread(threading.get_ident)))
        caller.start()
        caller.join()
    assert found == [in_lasting_thread(threading.get_ident)] * 2


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        in_lasting_thread(lambda: 1 / 0)
    assert in_lasting_thread(_name) == "lasting"


def test_a_signal_leaves_no_call_half_done() -> None:
    done = []

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.05)  # the main thread gets the signal
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        in_lasting_thread(interrupted)
    assert done


def test_a_forked_process_has_its_own() -> None:
    in_lasting_thread(_name)
    child = os.fork()
    if not child:
        os._exit(in_lasting_thread(_name) != "lasting")
    assert os.waitpid(child, 0)[1] == 0
