"""The site's navigation, pages and links. `make docs` checks that it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tools import docs_site, make_docs
from tools.docs_site import ROOT
from tools.make_locks import pins


def test_every_page_of_the_documentation_is_in_the_navigation():
    nav = re.findall(r"^\s+- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    by_hand = [path for pattern in ("*.md", "docs/*.md", "examples/*.md") for path in docs_site.paths(pattern)]
    assert sorted(nav) == sorted(by_hand)


def test_every_room_has_an_api_page():
    assert {"cache", "oracle", "schedule", "store"} <= set(docs_site.ROOMS)
    assert len(docs_site.ROOMS) == len(set(docs_site.ROOMS))


def test_linked_files_are_copied():
    assert "docs/pictures/cached-steps-cpu.svg" in docs_site.linked_files("README.md")
    assert not [path for path in docs_site.linked_files("README.md") if not (ROOT / path).is_file()]


def test_links_to_folders_become_text(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "page.md").write_text("")

    class Page:
        class file:  # noqa: N801 (as mkdocs names it)
            src_uri = "page.md"

    text = docs_site.on_page_markdown("[a](folder) [b](page.md#c) [d](https://e.f)", Page, None, None)
    assert text == "a [b](page.md#c) [d](https://e.f)"


def test_diagrams_are_indented():
    text = "Title.\n\na ──> b\nc ──> d\n\nProse.\n\n    x ─> y"
    assert docs_site.indent_diagrams(text) == "Title.\n\n    a ──> b\n    c ──> d\n\nProse.\n\n    x ─> y"


@pytest.mark.parametrize("name", [item.partition("[")[0] for item in make_docs.requirements()])
def test_site_requirements_are_pinned(name):
    assert name in pins("docs.txt")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs mkdocs")
@pytest.mark.timeout(600)
def test_every_link_of_the_site_leads_to_a_file(tmp_path):
    command = [sys.executable, "-m", "tools.make_docs", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    broken = []
    for page in tmp_path.rglob("index.html"):
        for target in re.findall(r'(?:href|src)="([^"#?:]+)[^":]*"', page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append((page.relative_to(tmp_path).as_posix(), target))
    assert not broken
