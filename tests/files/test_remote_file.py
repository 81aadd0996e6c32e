from __future__ import annotations

import gzip
import io

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.files.access import open_file
from bagpipe.files.remote import object_at
from bagpipe.files.remote_file import RemoteFile
from tests.files.contents import CONTENT, memory
from tests.files.s3_server import Proxy


@given(st.lists(st.tuples(st.sampled_from(["read", "seek", "line"]), st.integers(0, 300)), max_size=12))
def test_reads_as_a_local_file_does(steps: list[tuple[str, int]]) -> None:
    content = bytes(range(256)) * 1 + b"a\nbb\n\nccc"
    ours, theirs = RemoteFile(object_at(memory("steps", content))), io.BytesIO(content)
    for name, number in steps:
        if name == "seek":
            assert ours.seek(number) == theirs.seek(number)
        elif name == "line":
            assert ours.readline(number) == theirs.readline(number)
        else:
            assert ours.read(number) == theirs.read(number)
        assert ours.tell() == theirs.tell()


def test_ranges_and_streams(url: str) -> None:
    with open_file(url) as stream:
        assert stream.read(10) == CONTENT[:10]
        stream.seek(-5, io.SEEK_END)
        assert (stream.read(), stream.read(3)) == (CONTENT[-5:], b"")
        stream.seek(0)
        parts = []
        while part := stream.read(70_000):
            parts.append(part)
        assert b"".join(parts) == CONTENT


def test_sequential_reads_ask_for_longer_ranges(url: str, proxy: Proxy) -> None:
    with open_file(url) as stream:
        while stream.read(1000):
            pass
    assert sum(method == "GET" for method, _ in proxy.requests) <= 8


def test_libraries_read_through_it() -> None:
    text = memory("a.gz", gzip.compress(b"line\n" * 1000))
    with open_file(text) as file, gzip.open(file) as stream:
        assert stream.read() == b"line\n" * 1000
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": range(1000)}), sink)
    assert pq.ParquetFile(open_file(memory("a.parquet", sink.getvalue()))).read().num_rows == 1000
