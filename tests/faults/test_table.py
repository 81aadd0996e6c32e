"""The documentation's tables of faults and promises are complete, and every test and chaos kind in them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness.faults import KINDS

ROOT = Path(__file__).parents[2]
NUM_FAULTS, NUM_PROMISES = 33, 20
ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+?) \| (.+) \|")
TEST = re.compile(r"`((?:tests|bagpipe/testing)/[\w/]+\.py)(?:::(\w+))?`")
KIND = re.compile(r"chaos ((?:`[\w-]+`(?:, )?)+)")


def rows() -> dict[int, str]:
    """The last column by fault."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    found = [(int(match[1]), match[4]) for line in text.splitlines() if (match := ROW.fullmatch(line))]
    assert len(dict(found)) == len(found), "a fault is there twice"
    return dict(found)


def promises() -> dict[int, str]:
    """The last column of the threat model's promises by number."""
    text = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", text, flags=re.M)
    return {int(number): shown for number, shown in found}


def missing_tests(shown: str) -> list[str]:
    """Tests that a cell names and that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in TEST.findall(shown)
        if not (ROOT / file).exists() or (name and name not in functions(file))
    ]


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_the_table_is_complete() -> None:
    assert sorted(rows()) == list(range(1, NUM_FAULTS + 1))


@pytest.mark.parametrize("number", range(1, NUM_FAULTS + 1))
def test_every_named_test_exists(number: int) -> None:
    shown = rows()[number]
    tests, kinds = (
        TEST.findall(shown),
        [kind for found in KIND.findall(shown) for kind in re.findall(r"`(.+?)`", found)],
    )
    assert tests or "not tested: " in shown
    assert missing_tests(shown) == []
    assert set(kinds) <= {kind.name for kind in KINDS}


def test_every_promise_of_the_threat_model_has_a_test_that_exists() -> None:
    assert sorted(promises()) == list(range(1, NUM_PROMISES + 1))
    assert [number for number, shown in promises().items() if not TEST.findall(shown)] == []
    assert [missing for shown in promises().values() for missing in missing_tests(shown)] == []


def test_every_chaos_kind_is_in_the_table() -> None:
    text = " ".join(rows().values())
    named = {kind for found in KIND.findall(text) for kind in re.findall(r"`(.+?)`", found)}
    assert {kind.name for kind in KINDS} == named
