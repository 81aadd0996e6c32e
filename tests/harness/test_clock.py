from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from tests.harness.clock import ClockJump, find_compiler

DAY_S = 86_400
CLOCKS = "import sys, time; [print(time.time(), time.monotonic(), flush=True) for _ in sys.stdin]"


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_only_the_wall_clock_jumps(tmp_path: Path) -> None:
    with ClockJump(tmp_path) as clock:
        with subprocess.Popen(
            [sys.executable, "-c", CLOCKS],
            env={**os.environ, **clock.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            for offset_s in (0, DAY_S, -DAY_S):
                clock.jump(offset_s)
                program.stdin.write("\n")
                program.stdin.flush()
                wall_s, monotonic_s = map(float, program.stdout.readline().split())
                assert wall_s - time.time() == pytest.approx(offset_s, abs=30)
                assert time.monotonic() - monotonic_s == pytest.approx(0, abs=30)
            program.stdin.close()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="needs a C compiler: none of cc, gcc, clang is on PATH"):
        ClockJump(tmp_path).__enter__()
