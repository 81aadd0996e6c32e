"""Secrets by file and by environment: what is refused, and that no line shows one."""

from __future__ import annotations

import os
import re

import pytest

from bagpipe.errors import InputError
from bagpipe.util.secret_files import read_secret

SECRET = "sesame-open-0123456789"


def read(path="", least=16):
    return read_secret(str(path), subject="--secret-file", variable="BAGPIPE_TEST_SECRET", least=least)


@pytest.mark.parametrize(("mode", "mark"), [(0o400, ""), (0o600, "\ufeff"), (0o440, "")])
def test_a_file_that_others_cannot_read(tmp_path, monkeypatch, mode, mark):
    """It is taken rather than the variable. Kubernetes mounts secrets for the group (0440)."""
    file = tmp_path / "secret"
    file.write_text(f"{mark}  {SECRET}\n", encoding="utf-8")
    file.chmod(mode)
    monkeypatch.setenv("BAGPIPE_TEST_SECRET", "another secret of some length")
    assert read(file) == SECRET


def test_the_variable_without_a_file(monkeypatch):
    assert read() == ""
    monkeypatch.setenv("BAGPIPE_TEST_SECRET", SECRET)
    assert read() == SECRET
    monkeypatch.setenv("BAGPIPE_TEST_SECRET", "short")
    with pytest.raises(InputError, match=r"^BAGPIPE_TEST_SECRET: expected at least 16 printable characters, got 5$"):
        read()


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (SECRET, 0o644, "expected a file that other users cannot read, got mode 0644: chmod o-rwx it"),
        (SECRET, 0o602, "expected a file that other users cannot read, got mode 0602: chmod o-rwx it"),
        ("short", 0o600, "expected at least 16 printable characters, got 5"),
        (f"{SECRET}\n{SECRET}", 0o600, "expected at least 16 printable characters, got 45"),
        (SECRET + "é", 0o600, "expected ASCII text"),
        (SECRET * 999, 0o600, "expected at most 4096 bytes"),
        (None, 0, "No such file or directory"),
    ],
)
def test_what_is_refused(tmp_path, content, mode, message):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(InputError, match=rf"^--secret-file {re.escape(str(file))}: {re.escape(message)}$") as caught:
        read(file)
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_an_unreadable_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0)
    with pytest.raises(InputError, match=r"Permission denied$"):
        read(file)
