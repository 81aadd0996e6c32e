from __future__ import annotations

from bagpipe.files.version import FileVersion


def test_what_messages_say() -> None:
    assert str(FileVersion(num_bytes=3, tag="ab")) == "3 bytes, etag ab"
    assert str(FileVersion(inode=1, num_bytes=3, modified_ns=7, changed_ns=8)) == "3 bytes, modified at 7 ns"
