from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action, parse, torch_reads
from bagpipe.schedule.ir.ops import OPS

GOLDEN = [
    ("0F1", Action(0, "F", 1)),
    ("1B2", Action(1, "B", 2)),
    ("2I0", Action(2, "I", 0)),
    ("0W3", Action(0, "W", 3)),
    ("2SEND_F1", Action(2, "SEND_F", 1)),
    ("1RECV_B0", Action(1, "RECV_B", 0)),
    ("0UNSHARD", Action(0, "UNSHARD")),
    ("3RESHARD", Action(3, "RESHARD")),
    ("2REDUCE_GRAD", Action(2, "REDUCE_GRAD")),
    ("2REDUCE_GRAD4", Action(2, "REDUCE_GRAD", 4)),
    ("(0F7;7B3)OVERLAP_F_B", Action(-1, "OVERLAP_F_B", parts=(Action(0, "F", 7), Action(7, "B", 3)))),
    ("0X_FETCH5", Action(0, "X_FETCH", 5)),
    ("2OPT5", Action(2, "OPT", 5)),
    ("0F1@3", Action(0, "F", 1, version=3)),
    ("1B0~1", Action(1, "B", 0, pipe=1)),
    ("0F12@3~2", Action(0, "F", 12, version=3, pipe=2)),
    ("0SENDX_F1:3", Action(0, "SENDX_F", 1, peer=3)),
]


@pytest.mark.parametrize(("text", "action"), GOLDEN, ids=[text for text, _ in GOLDEN])
def test_text_and_action_are_equivalent(text: str, action: Action) -> None:
    assert parse(text) == action
    assert action.text == str(action) == text


# PyTorch's parser reads the first three as 0F, 0I and 0W without an index, and the fourth as 2B.
@pytest.mark.parametrize("text", ["0FETCH1", "0INSERT1", "0WRITEBACK1", "2BW0"])
def test_text_that_torch_misreads_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="expected an action"):
        parse(text)


def test_versions_are_parsed() -> None:
    """PyTorch reads 0F1@3 as 0F1."""
    assert parse("0F1@3") != parse("0F1")
    assert not torch_reads(parse("0F1@3"))


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "F1", "0", "0F", "0Z1", "0F1 ", " 0F1", "0F1\n", "00F1", "0F01", "-1F0", "0F-1", "0F1~0", "0f1",
        "0F1~1@2", "0F1@", "0F1:2", "0SENDX_F1", "0X_FETCH", "٠F1", "0F١", "0F1,0F2", "0F" + "9" * 5000,
        "()OVERLAP_F_B", "(0F7)OVERLAP_F_B", "(0F7;7B3)", "(0F7;7B3)OVERLAP_F_B1", "(0F7; 7B3)OVERLAP_F_B",
        "((0F1;1B0)OVERLAP_F_B;2B0)OVERLAP_F_B", "0OVERLAP_F_B1", "(0F7;7B3)OVERLAP_F_B\n",
    ],
)  # fmt: skip
def test_everything_but_canonical_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 0, "op": "FETCH", "index": 1},
        {"stage": -1, "op": "F", "index": 1},
        {"stage": 0, "op": "F"},
        {"stage": 0, "op": "F", "index": 1, "peer": 2},
        {"stage": 0, "op": "F", "index": 1, "parts": (Action(0, "F", 0), Action(0, "B", 0))},
        {"stage": 0, "op": "OVERLAP_F_B", "parts": (Action(0, "F", 0), Action(0, "B", 0))},
    ],
)
def test_fields_must_fit_the_op(fields: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        Action(**fields)  # type: ignore[arg-type]


NUMBERS = st.integers(0, 10**12)


@st.composite
def atoms(draw: st.DrawFn) -> Action:
    op = OPS[draw(st.sampled_from([name for name in OPS if OPS[name].role != "overlap"]))]
    return Action(
        stage=draw(NUMBERS),
        op=op.name,
        index=draw(NUMBERS | st.none()) if op.index_optional else draw(NUMBERS),
        peer=draw(NUMBERS) if op.peer else None,
        version=draw(st.none() | NUMBERS),
        pipe=draw(st.integers(0, 3)),
    )


ACTIONS = atoms() | st.lists(atoms(), min_size=2, max_size=3).map(
    lambda parts: Action(-1, "OVERLAP_F_B", parts=tuple(parts))
)


@given(ACTIONS)
def test_text_round_trips(action: Action) -> None:
    assert parse(action.text) == action


@given(st.text(alphabet="0123456789FBIWXSENDGETROPAV_()@~;: ", max_size=14))
def test_whatever_parses_is_canonical(text: str) -> None:
    try:
        action = parse(text)
    except ScheduleError:
        return
    assert action.text == text


schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is the reference here")


@given(ACTIONS)
def test_torch_parses_compatible_cells_equally(action: Action) -> None:
    """PyTorch's own parser is the reference for compatible cells."""
    if torch_reads(action):
        assert str(schedules._Action.from_str(action.text)) == action.text
