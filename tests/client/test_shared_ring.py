"""`RingWriter` and `RingReader`: messages through a file in memory."""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client.agreement import MAX_CACHER_MESSAGE_BYTES
from bagpipe.client.shared_ring import RingReader, RingWriter, SharedFile

pytestmark = pytest.mark.skipif(not RingWriter.is_supported, reason="files in memory need Linux")

SIZE = 1000


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    with RingWriter(SIZE) as writer:
        yield writer


@given(st.lists(st.tuples(st.integers(0, SIZE + 1), st.integers(0, 4)), max_size=40), st.randoms(use_true_random=False))
def test_messages_come_back_in_order(steps: list[tuple[int, int]], chance: random.Random) -> None:
    """Each step puts a message, and takes some of those before. A message has no room only beside others."""
    waiting: deque[tuple[int, bytes]] = deque()
    with RingWriter(SIZE) as writer, RingReader(writer.file) as reader:
        for num_bytes, num_taken in steps:
            message = chance.randbytes(num_bytes)
            start = writer.put(message)
            if start is not None:
                waiting.append((start, message))
            else:
                assert num_bytes > SIZE or waiting
            for _ in range(min(num_taken, len(waiting))):
                start, expected = waiting.popleft()
                assert reader.take(start, len(expected)) == expected
        for start, expected in waiting:
            assert reader.take(start, len(expected)) == expected
        assert writer.put(bytes(SIZE)) is not None, "all is free again"


def test_an_idle_ring_begins_anew(writer: RingWriter) -> None:
    """Messages that are taken at once use the same memory again and again."""
    with RingReader(writer.file) as reader:
        for number in range(5):
            start = writer.put(b"x" * 10)
            assert start == number * SIZE
            assert reader.take(start, 10) == b"x" * 10


def test_without_a_reader_it_is_full_for_good(writer: RingWriter) -> None:
    assert writer.put(bytes(600)) == 0
    assert writer.put(bytes(600)) is None
    assert writer.put(bytes(400)) == 600
    assert writer.put(b"x") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nonce": b"\0" * 16}, "got another one"),
        ({"num_bytes": SIZE - 1}, "of another size"),
        ({"num_bytes": 0}, "expected at most"),
        ({"num_bytes": MAX_CACHER_MESSAGE_BYTES + 1}, "expected at most"),
    ],
)
def test_another_file_is_not_used(writer: RingWriter, change: dict[str, bytes | int], message: str) -> None:
    file: SharedFile = replace(writer.file, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message), RingReader(file):
        pass


def test_a_file_of_a_file_system_is_not_used(writer: RingWriter, tmp_path: Path) -> None:
    """A lying cacher names a file that the trainer may write, with the size and the first bytes that it says."""
    with RingReader(writer.file) as reader:
        content = os.pread(reader._fd, 2 * SIZE, 0)
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    with path.open("r+b") as file:
        named = replace(writer.file, pid=os.getpid(), fd=file.fileno())
        with pytest.raises((OSError, ValueError)), RingReader(named):
            pass
    assert path.read_bytes() == content


def test_a_file_in_memory_without_its_seals_is_not_used(writer: RingWriter) -> None:
    """Its size could change."""
    with RingReader(writer.file) as reader:
        content = os.pread(reader._fd, 2 * SIZE, 0)
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, content, 0)
        with pytest.raises(ValueError, match="one with other seals"), RingReader(replace(writer.file, fd=fd)):
            pass
    finally:
        os.close(fd)


def test_a_message_without_memory_is_not_put(writer: RingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    with RingReader(writer.file) as reader:
        for failing in (refuse, lambda fd, parts, offset: write(fd, parts[:-1], offset)):
            monkeypatch.setattr(os, "pwritev", failing)
            assert writer.put(b"lo", b"st") is None
        monkeypatch.setattr(os, "pwritev", write)
        start = writer.put(b"whole")
        assert start is not None
        assert reader.take(start, 5) == b"whole"


def test_more_parts_than_a_call_takes() -> None:
    parts = [bytes([number % 256]) for number in range(3_000)]
    with RingWriter() as writer, RingReader(writer.file) as reader:
        start = writer.put(*parts)
        assert start is not None
        assert reader.take(start, 3_000) == b"".join(parts)


def test_descriptors_that_are_no_files_are_not_waited_for(writer: RingWriter) -> None:
    """In a container with processes of its own, the number can be anything."""
    ends = os.pipe()
    try:
        for fd in (*ends, 10**6):
            with pytest.raises((OSError, ValueError)), RingReader(replace(writer.file, fd=fd)):
                pass
    finally:
        for fd in ends:
            os.close(fd)


def test_no_end_can_change_the_size(writer: RingWriter) -> None:
    with RingReader(writer.file) as reader:
        for num_bytes in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(reader._fd, num_bytes)


def test_a_false_count_is_an_error(writer: RingWriter) -> None:
    with RingReader(writer.file) as reader:
        writer.put(bytes(100))
        reader.take(500, 100)
        with pytest.raises(ValueError, match="600 bytes taken from shared memory, where 100 were put"):
            writer.put(bytes(100))


@pytest.mark.parametrize(("start", "num_bytes"), [(0, SIZE + 1), (900, 101), (1 << 63, 1)])
def test_a_message_that_cannot_be_there_is_an_error(writer: RingWriter, start: int, num_bytes: int) -> None:
    with RingReader(writer.file) as reader, pytest.raises(ValueError, match="in shared memory of 1000"):
        reader.take(start, num_bytes)


def test_files_are_closed() -> None:
    before = os.listdir("/proc/self/fd")
    with RingWriter(SIZE) as writer, RingReader(writer.file):
        pass
    with suppress(ValueError), RingWriter(SIZE) as writer, RingReader(replace(writer.file, nonce=b"")):
        pass
    assert os.listdir("/proc/self/fd") == before
