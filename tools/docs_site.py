"""MkDocs hook: the pages of the site and its API reference. Folders are the repository's, so links work in both.

    README.md, CHANGELOG.md, CONTRIBUTING.md, docs/, examples/, benchmarks/*/README.md ──> pages
    files they link to (pictures, code, results)                                       ──> copied as they are
    bagpipe/<room>/                                                                    ──> api/<room>.md
    public names of the library                                                        ──> api/bagpipe.md

Folders have no page: a link to one becomes plain text.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*/README.md")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

#: Arrows and lines of a diagram.
DRAWS = re.compile("──|─>|<─|[│┐└┘├┤]")

#: Folders of the library, one page of the API reference each.
ROOMS = sorted(path.parent.name for path in (ROOT / "bagpipe").glob("*/__init__.py"))

#: Page of the public names, and where they are.
PUBLIC = "api/bagpipe.md"
NAMES = (
    "bagpipe.train_pipeline.pipeline.TrainPipeline",
    "bagpipe.client.access.Cacher",
    "bagpipe.optim",
    "bagpipe.errors",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Extend the navigation by the groups that follow from the tree."""
    assert config.nav is not None
    config.nav.append({"Decisions": paths("docs/decisions/*.md")})
    config.nav.append({"Benchmarks": paths("benchmarks/*/README.md")})
    config.nav.append({"API": [PUBLIC, *(f"api/{room}.md" for room in ROOMS)]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages of the docs folder by those of the repository."""
    from mkdocs.structure.files import File  # here, so that the tests need no mkdocs

    for file in [file for file in files if (file.abs_src_path or "").startswith(f"{config.docs_dir}/")]:
        files.remove(file)  # the theme's own files stay
    pages = [path for pattern in PAGES for path in paths(pattern)]
    linked = {path for page in pages for path in linked_files(page)}
    for path in dict.fromkeys([*pages, *sorted(linked)]):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, PUBLIC, content="\n\n".join(["# bagpipe", *map("::: {}".format, NAMES)])))
    for room in ROOMS:
        text = f"# bagpipe.{room}\n\n::: bagpipe.{room}\n    options:\n      show_root_heading: false\n"
        files.append(File.generated(config, f"api/{room}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to folders into text."""
    folder = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda match: match[1] if (folder / match[2]).is_dir() else match[0], markdown)


def indent_diagrams(docstring: str) -> str:
    """Indent paragraphs that draw, so that Markdown keeps their lines."""
    paragraphs = docstring.split("\n\n")
    drawn = [DRAWS.search(text) is not None and not re.search("^ ", text, re.MULTILINE) for text in paragraphs]
    return "\n\n".join(
        textwrap.indent(text, "    ") if draws else text for text, draws in zip(paragraphs, drawn, strict=True)
    )


def paths(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def linked_files(page: str) -> list[str]:
    """Files of the repository that a page links to or shows."""
    folder = (ROOT / page).parent
    targets = [folder / target for _, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8"))]
    return [target.resolve().relative_to(ROOT).as_posix() for target in targets if target.is_file()]
