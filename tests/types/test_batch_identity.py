"""The bytes that stand for a file, and the comparison of two identities. Real files: `tests.cacher.test_identity`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.types.batch_identity import BatchIdentity, FileIdentity, sampled_blocks, sections

MIB = 1 << 20
SIZES = st.integers(min_value=0, max_value=1 << 40)
NUM_FILES = st.integers(min_value=1, max_value=1 << 20)


def file(name: str, content: str = "a", **more: Any) -> FileIdentity:
    """A file whose blocks have one-letter digests."""
    values: dict[str, Any] = {"name": name, "num_bytes": 100 * len(content), "sampled": tuple(content)}
    return FileIdentity(**{**values, **more})


def identity(*files: FileIdentity, **more: Any) -> BatchIdentity:
    values: dict[str, Any] = {"code": "c", "layout": "lines", "files": files}
    return BatchIdentity(**{**values, **more})


@given(SIZES, NUM_FILES)
def test_sampled_blocks_are_ascending_and_inside_the_file(num_bytes: int, num_files: int) -> None:
    blocks = sampled_blocks(num_bytes, num_files)
    bounds = [bound for block in blocks for bound in (block.start, block.stop)]
    assert bounds == sorted(bounds)
    assert all(blocks)
    assert len(blocks) <= 16
    if num_bytes:
        assert (blocks[0].start, blocks[-1].stop) == (0, num_bytes)


@given(st.integers(min_value=0, max_value=64 * MIB), st.integers(min_value=1, max_value=16))
def test_files_up_to_64_mib_are_sampled_whole(num_bytes: int, num_files: int) -> None:
    assert sum(map(len, sampled_blocks(num_bytes, num_files))) == num_bytes


@given(SIZES, st.integers(min_value=1, max_value=1 << 14))
def test_at_most_1_gib_is_sampled_of_all_files(num_bytes: int, num_files: int) -> None:
    assert num_files * sum(map(len, sampled_blocks(num_bytes, num_files))) <= 1 << 30


def test_blocks_of_a_large_file_are_spread_evenly() -> None:
    blocks = sampled_blocks(1 << 30, 1)
    assert {len(block) for block in blocks} == {4 * MIB}
    gaps = {after.start - block.start for block, after in itertools.pairwise(blocks)}
    assert max(gaps) - min(gaps) <= 1
    assert [len(block) for block in sampled_blocks(1 << 30, 24)] == [2 * MIB] * 16
    assert [len(block) for block in sampled_blocks(1 << 30, 1 << 20)] == [4096] * 16


@given(SIZES)
def test_sections_divide_a_file(num_bytes: int) -> None:
    parts = sections(num_bytes)
    assert (len(parts), parts[0].start, parts[-1].stop) == (16, 0, num_bytes)
    assert all(part.stop == after.start for part, after in itertools.pairwise(parts))


def test_an_identity_reads_back() -> None:
    known = identity(file("x", "ab", sections=("s", "t")), file("empty", ""))
    assert BatchIdentity.from_json(json.loads(json.dumps(known.to_json()))) == known


@pytest.mark.parametrize(
    "value",
    [None, "", [], {}, {"code": "c", "layout": "l"}, {"code": "c", "layout": "l", "files": [{"name": "x"}]},
     {"code": "c", "layout": "l", "files": [{"name": "x", "num_bytes": "many", "sampled": "", "sections": ""}]},
     {"code": "c", "layout": "l", "files": [{"name": "x", "num_bytes": 1, "sampled": 2, "sections": ""}]}],
)  # fmt: skip
def test_something_else_is_no_identity(value: object) -> None:
    with pytest.raises(InputError, match=r"^the identity of the data cannot be read$"):
        BatchIdentity.from_json(value)


def test_names_are_not_compared() -> None:
    assert identity(file("/old/day_0")).first_change(identity(file("/new/0"))) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (identity(layout="pages"), identity(), "it is read as 'lines', not as 'pages'"),
        (identity(file("x")), identity(file("x"), file("y")), "it has 2 files of 200 bytes, not 1 files of 100 bytes"),
        (identity(file("x")), identity(file("x", num_bytes=99)), "x has 99 bytes, not 100"),
        (identity(file("/old/x")), identity(file("/new/x", "b")),
         "/new/x (then /old/x) has other content: the block at byte 0, of 100 bytes, differs"),
        (identity(file("x"), file("y", "b")), identity(file("x", "b"), file("y")),
         "x has the content that y had"),
        (identity(file("/old/x"), file("/old/y", "b")), identity(file("/new/y", "b"), file("/new/x")),
         "/new/y (then /old/x) has the content that /old/y had"),
        (identity(file("x", sections=tuple("0123456789abcdef"))),
         identity(file("x", sections=tuple("01234_6789abcdef"))),
         "x has other content: the block at byte 31, of 6 bytes, differs"),
    ],
)  # fmt: skip
def test_the_first_change_names_the_file(before: BatchIdentity, after: BatchIdentity, words: str) -> None:
    assert before.first_change(after) == words


def test_the_first_changed_block_is_named() -> None:
    before = file("x", "abcdefghijklmnop", num_bytes=1 << 30)
    after = dataclasses.replace(before, sampled=tuple("ab_defghijklmnop"))
    start = ((1 << 30) - 4 * MIB) * 2 // 15
    assert identity(before).first_change(identity(after)) == (
        f"x has other content: the block at byte {start}, of {4 * MIB} bytes, differs"
    )


def test_whole_and_sampled_hashes_agree_as_far_as_both_are_known() -> None:
    sampled, full = identity(file("x")), identity(file("x", sections=("s",)))
    assert sampled.first_change(full) is None
    assert full.first_change(sampled) is None
    assert sampled.knows_less_than(full)
    assert not full.knows_less_than(sampled)
    assert not sampled.knows_less_than(sampled)
