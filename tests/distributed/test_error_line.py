"""The error line of several ranks: printed once, by rank 0 if it can, and never lost."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from bagpipe.distributed import error_line
from bagpipe.distributed.error_line import print_once
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError, JobError, PeerError
from tests.distributed.processes import LONG_DEADLINE_S, run_ranks

pytestmark = pytest.mark.multiproc


def printed(membership: Membership, errors: Sequence[BaseException | None], wait_s: float = 60.0) -> list[str]:
    """Lines that a rank prints of its error. A rank without one ends with what it learns from the others."""
    error_line._WAIT_S = wait_s  # of this process, which ends with the test
    error = errors[membership.rank]
    if error is None:
        with pytest.raises((InputError, PeerError)) as raised, TorchPeers(membership, timeout_s=LONG_DEADLINE_S):
            pass
        error = raised.value
    lines: list[str] = []
    print_once(membership, error, lambda shown: lines.append(f"{type(shown).__name__}: {shown}"))
    return lines


def ranks_print(errors: Sequence[BaseException | None], **options: float) -> list[list[str]]:
    ends = run_ranks(len(errors), printed, errors, *options.values())
    assert [end.error for end in ends] == [None] * len(errors)
    return [end.value for end in ends]


@pytest.mark.parametrize(
    "others",
    [
        InputError("no such file"),
        InputError("rank 0: no such file"),
        PeerError("rank 0: no such file"),
        PeerError("lost rank 0, dead or stopped"),
    ],
)
def test_rank_0_alone_prints_an_error_that_all_ranks_end_with(others: Exception) -> None:
    lines = ranks_print([InputError("no such file"), others, others])
    assert lines == [["InputError: no such file"], [], []]


@pytest.mark.parametrize("error", [InputError("no such file"), JobError("out of memory")])
def test_rank_0_prints_the_error_of_a_rank_that_fails_before_it_comes(error: Exception) -> None:
    kind = "InputError" if isinstance(error, InputError) else "PeerError"
    assert ranks_print([None, error, None]) == [[f"{kind}: rank 1: {error}"], [], []]


def test_different_errors_are_all_printed() -> None:
    lines = ranks_print([InputError("no such file"), InputError("no such folder")])
    assert lines == [["InputError: no such file"], ["InputError: rank 1: no such folder"]]


def test_a_defect_is_printed_by_its_own_rank_too() -> None:
    assert ranks_print([None, ZeroDivisionError("zero")]) == [
        ["PeerError: rank 1: ZeroDivisionError: zero"],
        ["ZeroDivisionError: zero"],
    ]


def silent_rank_0(membership: Membership, error: Exception) -> list[str]:
    return [] if membership.rank == 0 else printed(membership, [None, error], wait_s=0.1)


def test_a_rank_prints_what_rank_0_does_not() -> None:
    ends = run_ranks(2, silent_rank_0, InputError("no such file"))
    assert ends[1].value == ["InputError: rank 1: no such file"]


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_store_every_rank_prints(rank: int) -> None:
    lines: list[str] = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # does not listen
        membership = Membership(rank=rank, world_size=2, port=other.getsockname()[1], store_is_launchers=True)
        print_once(membership, InputError("no such file"), lambda shown: lines.append(str(shown)))
    assert lines == ["no such file" if rank == 0 else "rank 1: no such file"]


def test_without_a_launcher_every_rank_prints() -> None:
    ends = run_ranks(2, printed, [InputError("no such file")] * 2, hosted_by_rank_0=True)
    assert [end.value for end in ends] == [["InputError: no such file"]] * 2
