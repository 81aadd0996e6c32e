"""Every module is found from its room: by its name, or a public name of it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT


def test_every_room_names_its_modules() -> None:
    """In the docstring of the room or of one around it; or by path on the architecture page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = []
    for package in ("bagpipe", "cacher", "data", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT)
            rooms = [ROOT / folder / "__init__.py" for folder in name.parents if folder.name]
            words = {word for room in rooms for word in re.findall(r"\w+", docstring_of(room))}
            is_named = words & {path.stem, *public_names(path)} or name.as_posix() in page
            if not is_named and not path.name.startswith("__"):
                missing.append(name.as_posix())
    assert not missing


def test_names_in_the_docstring_of_a_room_are_right() -> None:
    """``module.Name``: there is such a module or folder, and the name is public there."""
    wrong = []
    for package in ("bagpipe", "cacher", "data", "trainer"):
        files = sorted((ROOT / package).rglob("*.py"))
        for room in (path for path in files if path.name == "__init__.py"):
            text = re.sub(r"^ *(>>>|\.\.\.).*", "", docstring_of(room), flags=re.MULTILINE)  # examples name torch's
            for module, name in re.findall(r"(\w+)\.([A-Z]\w+)", text):
                homes = [path for path in files if module in (path.stem, path.parent.name)]
                if not any(name in public_names(path) for path in homes):
                    wrong.append(f"{room.relative_to(ROOT)}: {module}.{name}")
    assert not wrong


@cache
def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


@cache
def public_names(path: Path) -> list[str]:
    """Names in ``__all__``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
