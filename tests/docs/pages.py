"""The pages under test: Markdown files, their code spans, code blocks, command lines and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: How a block of commands begins.
_COMMAND = re.compile(
    r"\$ |[A-Z]\w*=|\(|examples/|(?:\.venv/bin/)?(?:python|torchrun) |"
    r"(?:bagpipe|cp|docker|export|kubectl|ln|make|mkdir|pip|redis-cli|timeout) "
)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str = "") -> list[str]:
    """Bodies of the fenced code blocks, of one language or of all."""
    found = [fence.split("\n", 1) for fence in _FENCE.findall(read(page))]
    return [body.removesuffix("```") for head, body in found if head[3:].startswith(language)]


def command_blocks(page: str) -> list[list[str]]:
    """The command lines of each block that has some, in the page's order: each whole, without prompt and comment."""
    found = []
    for head, body in (fence.split("\n", 1) for fence in _FENCE.findall(read(page))):
        if head[3:] in ("", "sh") and _COMMAND.match(body):
            lines = re.sub(r"\\\n\s*", " ", body.removesuffix("```")).splitlines()
            if body.startswith("$ "):  # a session: the other lines are its output
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            found.append([text for line in lines if (text := re.split(r"\s#", line)[0].rstrip())])
    return found


def prose(page: str) -> str:
    """The page without its code blocks; of the changelog's rename tables, only the new names."""
    text = _FENCE.sub("", read(page))
    if page != "CHANGELOG.md":
        return text
    return "\n".join(line.rsplit("|", 2)[-2] if line.startswith("|") else line for line in text.splitlines())


def spans(page: str) -> list[str]:
    """Code spans outside of code blocks."""
    return _SPAN.findall(prose(page))


def links(page: str) -> list[str]:
    """Targets of links to files and headings, without web addresses."""
    return [target for target in _LINK.findall(prose(page)) if "://" not in target]


def anchors(page: str) -> set[str]:
    """Anchors of the page's headings, as GitHub and the site generate them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
