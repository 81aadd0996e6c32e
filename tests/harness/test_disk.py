from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from tests.harness.disk import SmallDisk


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_fills_up_and_is_freed(tmp_path: Path) -> None:
    with SmallDisk(tmp_path, num_bytes=1 << 20) as disk:
        (tmp_path / "kept").write_bytes(b"kept")
        disk.fill()
        with pytest.raises(OSError, match="No space left") as caught:
            (tmp_path / "more").write_bytes(b"more")
        assert caught.value.errno == errno.ENOSPC
        disk.free()
        (tmp_path / "more").write_bytes(bytes(1 << 19))
        disk.fill(leave_bytes=1 << 16)
        assert disk.free_bytes >= 1 << 16
        assert (tmp_path / "kept").read_bytes() == b"kept"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a disk of 4096 bytes cannot be mounted at .*; needs root"):
        SmallDisk(tmp_path / "none", num_bytes=4096).__enter__()
