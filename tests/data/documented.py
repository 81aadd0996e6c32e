"""The code blocks of docs/data-formats.md, by section and language."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["documented"]

PAGE = Path(__file__).parents[2] / "docs/data-formats.md"


def documented(section: str, language: str) -> list[str]:
    """The blocks of one language in the section of that title."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, f"{section} has no block of {language}"
    return found
