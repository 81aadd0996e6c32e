"""Compressions by their first bytes, and the content of compressed streams."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.files.compression import START_BYTES, compression_of, inflated, is_zlib, open_inflated

TEXT = b"1\t2\n" * 1000


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", content)
    return file.getvalue()


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped,
    "zstd": lambda content: pa.compress(content, "zstd", asbytes=True),
    "lz4": lambda content: pa.compress(content, "lz4", asbytes=True),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("content", [TEXT, b""])
def test_first_bytes_tell_the_compression(name: str, content: bytes) -> None:
    assert compression_of(COMPRESSIONS[name](content)[:START_BYTES]) == name


def test_zlib_can_be_a_text_too() -> None:
    assert all(is_zlib(zlib.compress(TEXT, level)) for level in range(10))
    assert is_zlib(b"x^2")
    assert compression_of(b"x^2") == ""
    assert not any(map(is_zlib, (b"", b"x", b"1\t", gzip.compress(TEXT))))


@given(texts=st.lists(st.binary(max_size=50), min_size=1, max_size=4), step=st.integers(1, 20), pad=st.integers(0, 30))
def test_content_comes_in_pieces(texts: list[bytes], step: int, pad: int) -> None:
    """Of one member after the other, and of zeros that pad the file."""
    packed = b"".join(gzip.compress(text) for text in texts) + bytes(pad)
    pieces = list(inflated(io.BytesIO(packed), step))
    assert b"".join(pieces) == b"".join(texts)
    assert all(0 < len(piece) <= step for piece in pieces)
    stream = open_inflated(io.BytesIO(packed), "gzip", step)
    assert stream.read(30) + stream.read() == b"".join(texts)


@pytest.mark.parametrize(("kind", "pack"), [("gzip", gzip.compress), ("zlib", zlib.compress)])
def test_damage_is_named(kind: str, pack: Callable[[bytes], bytes]) -> None:
    assert open_inflated(io.BytesIO(pack(TEXT)), kind).read() == TEXT
    with pytest.raises(InputError, match=f"expected the end of the {kind} stream, got a file cut short"):
        open_inflated(io.BytesIO(pack(TEXT)[:-1]), kind).read()
    with pytest.raises(InputError, match=f"expected {kind} data, got a corrupt stream"):
        open_inflated(io.BytesIO(pack(TEXT)[:-2] + b"\xaa\xaa"), kind).read()
