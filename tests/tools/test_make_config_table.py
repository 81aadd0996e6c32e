"""The documented table of keys equals the generated one."""

from __future__ import annotations

from tools.make_config_table import PAGE, rewritten


def test_the_documented_keys_are_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page, "run python -m tools.make_config_table"
