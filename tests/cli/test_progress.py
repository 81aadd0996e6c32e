from __future__ import annotations

import io

from bagpipe.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_comes_every_ten_seconds():
    stream = io.StringIO()
    times_s = iter([0.0, 4.0, 9.9, 10.5, 12.0, 20.4, 20.6, 31.0])
    with Progress("plan", stream=stream, clock=lambda: next(times_s)) as progress:
        show = progress.phase("measuring")
        for done in range(1, 7):
            show(done, 6)
        progress.phase("comparing")(1, 2000)
    assert stream.getvalue().splitlines() == [
        "plan: measuring: 3 of 6, 50%, 10 s",
        "plan: measuring: 6 of 6, 100%, 21 s",
        "plan: comparing: 1 of 2,000, 0%, 31 s",
    ]


def test_a_terminal_has_a_bar_that_goes_away():
    stream = Terminal()
    with Progress("plan", stream=stream) as progress:
        for name in ("measuring", "comparing"):
            show = progress.phase(name)
            for done in range(1, 4):
                show(done, 3)
    text = stream.getvalue()
    assert "plan: measuring:" in text
    assert "plan: comparing:" in text
    assert not text.rsplit("\r", 1)[-1].strip(), "the last bar is erased"
