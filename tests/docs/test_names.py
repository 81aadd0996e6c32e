"""Every link, repository path, dotted name and configuration key that a page mentions exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from bagpipe.config.keys import config_keys
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links, spans

FOLDERS = "bagpipe|benchmarks|cacher|data|docs|examples|tests|tools|trainer"
PATH = re.compile(rf"(?:{FOLDERS})/[\w./*-]*")
FILE = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]+\.(?:json|md|proto|py|sh|svg|toml)\b")
DOTTED = re.compile(r"(?<![\w./-])(?:bagpipe|benchmarks|examples|tests|tools)(?:\.\w+)+")
MODULE_RUN = re.compile(rf"-m ((?:{FOLDERS})(?:\.\w+)*)")
SECTIONS = "cache|cacher|checkpoint|data|eval|model|optim|oracle|pipeline|run|store"
KEY = re.compile(rf"((?:{SECTIONS})\.[a-z_]+)(?: = .*)?")
FLAG = re.compile(rf"--((?:{SECTIONS})\.[a-z_]+)")
KEYS = {key.path for key in config_keys()}

PIPELINE = "bagpipe.train_pipeline.pipeline.TrainPipeline"

#: Files that are written by commands on the pages, or by the reader.
WRITTEN = {"benchmarks/gpu/rehearsal/", "model.safetensors", "tests/golden/schedules/my-schedule.txt"}


@cache
def names_in(module: Path) -> dict[str, ast.stmt]:
    """Top-level names of a module, and those of its ``__all__``, which it may import on first use."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        names = bound(node)
        if names == ["__all__"] and isinstance(node, ast.Assign):
            names += ast.literal_eval(node.value)
        found |= dict.fromkeys(names, node)
    return found


def bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def resolves(dotted: str) -> bool:
    """Whether ``package.module.name.attribute`` is a module, or is defined in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if module.is_file() or (place.is_dir() and length == len(parts)):
            return length == len(parts) or defines(module, parts[length:])
    return False


def defines(module: Path, names: list[str]) -> bool:
    node = names_in(module).get(names[0])
    if node is None or len(names) == 1 or not isinstance(node, ast.ClassDef):
        return node is not None
    return any(names[1] in bound(item) for item in node.body)


def test_the_resolver_distinguishes_names():
    good = ("benchmarks", "bagpipe.oracle", "bagpipe.TrainPipeline", "bagpipe.types.batch.Batch.select")
    bad = ("bagpipe.oracles", "bagpipe.types.batch.Crowd", "bagpipe.types.batch.Batch.deselect")
    assert [resolves(name) for name in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    for target in links(page):
        file, _, anchor = target.partition("#")
        place = (ROOT / page).parent / file if file else ROOT / page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place.resolve().relative_to(ROOT).as_posix()), target


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    named = {span.partition("::")[0] for span in spans(page)}
    paths = {name for name in named if PATH.fullmatch(name)}
    paths |= {path for block in blocks(page) for path in FILE.findall(block)}
    missing = {path for path in paths - WRITTEN if not any(ROOT.glob(path.rstrip("/")))}
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_exist(page):
    texts = [*spans(page), *blocks(page)]
    names = {name for text in texts for pattern in (DOTTED, MODULE_RUN) for name in pattern.findall(text)}
    assert not {name for name in names if not resolves(name)}


@pytest.mark.parametrize("page", PAGES)
def test_configuration_keys_exist(page):
    keys = {match[1] for span in spans(page) if (match := KEY.fullmatch(span))}
    lines = [*spans(page), *(line for block in blocks(page) for line in block.splitlines())]
    keys |= {key for line in lines if not line.startswith("error: ") for key in FLAG.findall(line)}
    calls = {key for key in keys if resolves(key.replace("pipeline", PIPELINE, 1))}  # of a TrainPipeline
    assert not {key for key in keys - KEYS - WRITTEN - calls if not resolves(key)}
