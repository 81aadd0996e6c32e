"""Processor, libraries and threads, on which a result's bits depend.

Whole jobs: `tests.system.test_resume`, `tests.system.test_ranks`.
"""

from __future__ import annotations

import json

import pytest
import torch

from bagpipe.client.agreement import Difference
from bagpipe.jobs.arithmetic import arithmetic_of, first_unlike, unlike_ranks

HERE = {"device": "cpu", "CPU capability": "AVX2", "threads": "1"}
THERE = {**HERE, "CPU capability": "AVX512", "threads": "2"}


def test_one_process_has_one_record() -> None:
    record = arithmetic_of("cpu")
    assert record == arithmetic_of("cpu") == json.loads(json.dumps(record))
    assert record["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    assert record["torch"].startswith(torch.__version__)
    assert record["threads"] == str(torch.get_num_threads())
    assert all(record.values())


def test_a_variable_that_chooses_kernels_changes_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    before = arithmetic_of("cpu")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    found = first_unlike(before, arithmetic_of("cpu"))
    assert found == Difference(path="MKL_CBWR", first="'not set'", second="'COMPATIBLE'")


def test_another_number_of_threads_changes_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic_of("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert first_unlike(before, arithmetic_of("cpu")) == Difference(
        path="threads", first=repr(before["threads"]), second="'1000'"
    )


def test_the_first_difference_is_found() -> None:
    assert first_unlike(HERE, dict(HERE)) is None
    assert first_unlike(HERE, THERE) == Difference(path="CPU capability", first="'AVX2'", second="'AVX512'")


def test_names_that_only_one_record_has_are_not_compared() -> None:
    """They were added by another version, or belong to another kind of device."""
    assert first_unlike({}, HERE) is None
    assert first_unlike(HERE, {**HERE, "new": "1"}) is None
    assert first_unlike({**HERE, "old": "1"}, HERE) is None


def test_ranks_unlike_rank_0_are_named() -> None:
    assert unlike_ranks([HERE]) == unlike_ranks([HERE, HERE]) == ""
    line = unlike_ranks([HERE, THERE, HERE, {**HERE, "threads": "4"}])
    assert line.startswith(
        "not all ranks compute like rank 0 (unlike: 1, 3): CPU capability is 'AVX2' on rank 0 and 'AVX512' on rank 1."
    )
    assert "\n" not in line
