"""`BuildPy`: setuptools' build_py, which also puts the programs into the wheel, as the package bagpipe.programs.

    trainer/cli.py                    from data.x import y
      │ rewritten
      v
    bagpipe/programs/trainer/cli.py   from bagpipe.programs.data.x import y

In a checkout the programs are top-level packages. In site-packages a package called ``data`` would hide a user's own,
or be hidden by it, so there they have other names. Only import statements name them: modules that are chosen at run
time are named relative to their package (tests/test_packaging.py looks for strings that name a module). pyproject.toml
names this class; an editable install uses the checkout as it is.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

PROGRAMS = ("cacher", "data", "trainer")
HOME = "bagpipe.programs"

_INIT = '"""The programs: cacher, data and trainer, as `bagpipe` and ``python -m bagpipe.train`` run them."""\n'


class BuildPy(build_py):  # type: ignore[misc] # setuptools ships no types
    """Copies the library, then the programs with rewritten imports."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_programs(Path(self.build_lib) / HOME.replace(".", "/"), Path.cwd())


def write_programs(home: Path, checkout: Path) -> None:
    """Write the package of the programs anew.

    Args:
        home: its folder.
        checkout: the folder with the programs' packages.

    Raises:
        ValueError: an import that cannot be rewritten.
    """
    shutil.rmtree(home, ignore_errors=True)  # of an earlier build
    home.mkdir(parents=True)
    (home / "__init__.py").write_text(_INIT, encoding="utf-8")
    for program in PROGRAMS:
        for path in sorted((checkout / program).rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            target = home / path.relative_to(checkout)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in (".py", ".pyi"):
                target.write_text(rewritten(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8")
            else:
                shutil.copyfile(path, target)


def rewritten(source: str, path: str = "<source>") -> str:
    """A module with the programs imported from `HOME`. Lines keep their numbers.

    Raises:
        ValueError: ``import data.x``, which binds the package's name to another module.
    """
    lines = source.encode().splitlines(keepends=True)  # columns of the syntax tree count bytes
    for line, column, before, old, new in sorted(_renamed(ast.parse(source, path), path), reverse=True):
        text = lines[line - 1]
        found = re.compile(before + re.escape(old.encode()) + rb"\b").match(text, column)
        if found is None:
            raise ValueError(f"{path}:{line}: expected an import of {old}, got {text.decode()!r}")
        name = found.end() - len(old)
        lines[line - 1] = text[:name] + new.encode() + text[found.end() :]
    return b"".join(lines).decode()


def _renamed(tree: ast.Module, path: str) -> Iterator[tuple[int, int, bytes, str, str]]:
    """Line and column of what is before a name (a pattern), the name there, and its new one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_program(node.module or ""):
            yield node.lineno, node.col_offset, rb"from\s+", node.module or "", f"{HOME}.{node.module}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if not _is_program(name.name):
                    continue
                if "." in name.name and name.asname is None:
                    raise ValueError(
                        f"{path}:{name.lineno}: expected `from {name.name} import …`, got `import {name.name}`"
                    )
                new = f"{HOME}.{name.name}" + ("" if name.asname else f" as {name.name}")
                yield name.lineno, name.col_offset, b"", name.name, new


def _is_program(module: str) -> bool:
    return module.partition(".")[0] in PROGRAMS
