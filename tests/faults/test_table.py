"""The documentation's table of faults is complete, and every test and chaos kind in it exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness.faults import KINDS

ROOT = Path(__file__).parents[2]
NUM_FAULTS = 33
ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+?) \| (.+) \|")
TEST = re.compile(r"`((?:tests|bagpipe/testing)/[\w/]+\.py)(?:::(\w+))?`")
KIND = re.compile(r"chaos ((?:`[\w-]+`(?:, )?)+)")


def rows() -> dict[int, str]:
    """The last column by fault."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    found = [(int(match[1]), match[4]) for line in text.splitlines() if (match := ROW.fullmatch(line))]
    assert len(dict(found)) == len(found), "a fault is there twice"
    return dict(found)


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
    missing = [f"{file}::{name}" for file, name in tests if not (ROOT / file).exists()]
    missing += [
        f"{file}::{name}" for file, name in tests if name and (ROOT / file).exists() and name not in functions(file)
    ]
    assert missing == []
    assert set(kinds) <= {kind.name for kind in KINDS}


def test_every_chaos_kind_is_in_the_table() -> None:
    text = " ".join(rows().values())
    named = {kind for found in KIND.findall(text) for kind in re.findall(r"`(.+?)`", found)}
    assert {kind.name for kind in KINDS} == named
