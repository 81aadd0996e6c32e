import logging
from pathlib import Path

import pytest

from bagpipe.errors import CapacityError, InputError, JobError, StoreError
from bagpipe.util import program
from bagpipe.util.program import run_program

TESTS = str(Path(__file__).parents[1])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("file:3: expected 40 columns, got 39"), 2, "error: file:3: expected 40 columns, got 39"),
        (CapacityError("200 rows,\ncapacity 100"), 2, "error: 200 rows, capacity 100"),
        (StoreError("the server closed the connection"), 1, "error: the server closed the connection"),
        (JobError("a lane failed"), 1, "error: a lane failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(monkeypatch, capsys, error, code, line):
    def main(argv):
        raise error

    monkeypatch.delenv("BAGPIPE_TRACEBACK", raising=False)
    assert run_program(main, []) == code
    assert capsys.readouterr().err.strip() == line


def test_a_traceback_on_request(monkeypatch, capsys):
    def main(argv):
        raise StoreError("gone")

    monkeypatch.setenv("BAGPIPE_TRACEBACK", "1")
    assert run_program(main, []) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.rstrip().endswith("error: gone")


def test_a_defect_keeps_its_traceback(capsys):
    def main(argv):
        raise ZeroDivisionError("our own")

    assert run_program(main, []) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (130, 130)])
def test_the_return_value_is_the_exit_code(returned, code):
    assert run_program(lambda argv: returned, []) == code


def test_a_traceback_begins_at_the_users_code(monkeypatch, capsys, tmp_path):
    """The frames before are the project's; torch's after it stay."""
    (tmp_path / "their_own.py").write_text("def build():\n    return inner()\ndef inner():\n    return 1 // 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("bagpipe.util.program._INSTALLED_FOLDERS", (*program._INSTALLED_FOLDERS, TESTS))
    monkeypatch.delenv("BAGPIPE_TRACEBACK", raising=False)

    def main(argv):
        from their_own import build

        build()

    assert run_program(main, []) == 1
    shown = capsys.readouterr().err
    assert "in build" in shown
    assert "in inner" in shown
    assert "run_program" not in shown
    assert shown.startswith("2 frames before the first one of your code are left out (BAGPIPE_TRACEBACK=1")
    monkeypatch.setenv("BAGPIPE_TRACEBACK", "1")
    assert run_program(main, []) == 1
    assert "run_program" in capsys.readouterr().err


def test_warnings_are_printed_once_in_one_line(capsys):
    logger = logging.getLogger("bagpipe.store")
    with program.printed_warnings():
        for _ in range(2):
            logger.warning("the server\nis %s", "old")
        logger.info("no warning")
    assert capsys.readouterr().err == "warning: the server is old\n"
    assert logging.getLogger("bagpipe").propagate
