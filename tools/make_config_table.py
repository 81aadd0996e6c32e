"""Write the table of keys in docs/configuration.md from the dataclasses: ``python -m tools.make_config_table``.

bagpipe.config.sections ──config_keys──> one row per key ──between the two markers──> docs/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from bagpipe.config.keys import config_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def table() -> str:
    """All keys as a Markdown table."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key in config_keys():
        default = ",".join(map(str, key.default)) if isinstance(key.default, tuple) else str(key.default)
        default = default.lower() if isinstance(key.default, bool) else default
        shown = f"`{default}`" if default else ""
        values, meaning = (text.replace("|", "&#124;") for text in (key.values, key.help))
        rows.append(f"| `{key.path}` | {shown} | {values} | {meaning} |")
    return "\n".join(rows)


def rewritten(page: str) -> str:
    """`page` with the table between the markers replaced."""
    return between(page, BEGIN, END, table())


def between(page: str, begin: str, end: str, text: str) -> str:
    """`page` with the text between two markers replaced."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
