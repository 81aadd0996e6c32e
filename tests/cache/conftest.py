"""Fixtures of the cache's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _checked_sparse_tensors() -> Iterator[None]:
    """torch warns once about unset invariant checks for sparse tensors (gradients of the references)."""
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        yield
