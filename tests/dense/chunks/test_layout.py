from __future__ import annotations

import pytest

from bagpipe.dense.chunks.layout import ALIGN_BYTES, pack
from bagpipe.errors import InputError


def test_tensors_lie_in_their_order_and_do_not_overlap() -> None:
    layout = pack("abcd", [600, 100, 300, 1000], chunk_bytes=1024, states=["m", "v"])
    assert [(place.chunk, place.offset_bytes) for place in layout.places] == [(0, 0), (0, 768), (1, 0), (2, 0)]
    assert all(place.offset_bytes % ALIGN_BYTES == 0 for place in layout.places)
    assert (layout.num_of_kind, layout.num_chunks, layout.num_bytes) == (3, 12, 12 * 1024)
    assert [layout.gradient(1), layout.state(1, "m"), layout.state(2, "v")] == [4, 7, 11]


def test_a_chunk_is_as_large_as_the_largest_tensor_by_default() -> None:
    assert pack("ab", [10, 1000], chunk_bytes=0).chunk_bytes == 1024
    assert pack((), (), chunk_bytes=0).num_chunks == 0


def test_a_tensor_that_is_larger_than_a_chunk_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"dense\.chunk_bytes must be at least 1000, the bytes of over\.weight, got 999"
    ):
        pack(["bias", "over.weight"], [10, 1000], chunk_bytes=999)
