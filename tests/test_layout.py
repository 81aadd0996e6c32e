"""Structure of the code base: the table of docs/architecture.md, file lengths, and test files that mirror modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.covered_elsewhere import NO_MIRROR

ROOT = Path(__file__).parents[1]
OURS = ("bagpipe", "data", "cacher", "trainer")

#: Modules that pure rooms must not import, not even inside a function.
IMPURE_MODULES = {"torch", "torchrec", "fbgemm_gpu", "redis", "threading", "multiprocessing", "socket", "concurrent"}

MAX_LINES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Target of one import statement; `top`: runs when the module is imported."""

    path: str
    line: int
    module: str
    top: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def teardown_module() -> None:
    syntax_of.cache_clear()


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(item for path in modules() for item in imports_of(path))


def imports_of(path: Path) -> Iterator[Import]:
    tree = syntax_of(path)
    package = path.relative_to(ROOT).parent.parts
    top = set(top_level_nodes(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            targets = [".".join((*base, node.module or "")).strip(".")]
        else:
            continue
        for target in targets:
            yield Import(path=name_of(path), line=node.lineno, module=target, top=node in top)


def top_level_nodes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import: not inside functions, not under ``if TYPE_CHECKING``."""
    todo: list[ast.AST] = [tree]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)) or typing_only:
                continue
            if isinstance(child, ast.stmt):
                yield child
            todo.append(child)


def test_imports_of_every_form_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    file = tmp_path / "data" / "deep" / "x.py"
    file.write_text("import a.b, c\nfrom ..y import z\nfrom . import w\nif 1:\n import d\ndef f():\n from e import g\n")
    found = {(item.module, item.top) for item in imports_of(file)}
    assert found == {("a.b", True), ("c", True), ("data.y", True), ("data.deep", True), ("d", True), ("e", False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One row of the table of docs/architecture.md.

    Attributes:
        path: a folder or a file.
        packages: package -> the only files that import it; no files: all can.
        is_pure: no threads, sockets or tensors.
    """

    path: str
    packages: dict[str, frozenset[str]]
    is_pure: bool


@cache
def rooms() -> tuple[Room, ...]:
    """Rows of the table, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## The rooms") :]
    return tuple(room_of_row(row) for row in table.splitlines() if row.startswith("| `"))


def room_of_row(row: str) -> Room:
    path, _, packages = (cell.strip() for cell in row.strip("|").split("|"))
    found: dict[str, frozenset[str]] = {}
    for item in filter(None, (item.strip() for item in packages.split(";"))):
        names, _, files = item.partition(" in ")
        for name in names.split(", "):
            found[name] = frozenset(file.strip("` ") for file in files.split(",")) if files else frozenset()
    is_pure = found.pop("pure", None) is not None
    return Room(path=path.strip("`"), packages=found, is_pure=is_pure)


@cache
def place_of(path: str) -> int:
    """Row number of a module: that of the longest matching path."""
    places = [n for n, room in enumerate(rooms()) if path == room.path or path.startswith(f"{room.path}/")]
    assert places, f"{path} is in no room of docs/architecture.md"
    return max(places, key=lambda n: len(rooms()[n].path))


#: Modules that every module can import: they hold only the version.
FREE = {"bagpipe/__init__.py", "bagpipe/__main__.py"}


def dotted_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def dependencies() -> dict[str, frozenset[str]]:
    """Module file -> imported module files of ours, including type-only and local imports."""
    files = {dotted_name(name_of(path)): name_of(path) for path in modules()}
    found: dict[str, set[str]] = {name: set() for name in files.values()}
    for path in modules():
        for node in ast.walk(syntax_of(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                target = files.get(name) or files.get(name.rpartition(".")[0])
                if target is not None and target != name_of(path):
                    found[name_of(path)].add(target)
    return {name: frozenset(targets) for name, targets in found.items()}


def test_every_module_is_in_a_room():
    for path in modules():
        if name_of(path) not in FREE:
            place_of(name_of(path))
    assert all((ROOT / room.path).exists() for room in rooms()), "a room of the table is gone"


def test_imports_point_up_the_table():
    wrong = [
        f"{path} imports {target}"
        for path, targets in dependencies().items()
        for target in targets
        if path not in FREE and target not in FREE and place_of(target) > place_of(path)
    ]
    assert not wrong, "; ".join(sorted(wrong))


def test_no_modules_form_a_cycle():
    left = {path: set(targets) for path, targets in dependencies().items()}
    while free := {path for path, targets in left.items() if not targets & left.keys()}:
        left = {path: targets for path, targets in left.items() if path not in free}
    assert not left, f"circles among {sorted(left)}"


def test_one_module_of_the_trainer_starts_a_cacher():
    users = {path for path, targets in dependencies().items() if any(t.startswith("cacher/") for t in targets)}
    assert {path for path in users if not path.startswith("cacher/")} == {"trainer/services.py"}


def test_no_code_imports_tests_or_tools():
    wrong = [item for item in all_imports() if item.root in {"tests", "tools", "benchmarks", "examples"}]
    assert not wrong, "; ".join(map(str, wrong))


def test_packages_are_used_where_the_table_says():
    everywhere = {*sys.stdlib_module_names, *OURS, "numpy"}
    wrong = []
    for item in all_imports():
        if item.root in everywhere or item.path in FREE:
            continue
        files = rooms()[place_of(item.path)].packages.get(item.root)
        if files is None or (files and Path(item.path).name not in files):
            wrong.append(item)
    assert not wrong, "; ".join(map(str, wrong))


def test_the_pure_rooms_are_pure():
    wrong = [item for item in all_imports() if item.root in IMPURE_MODULES and rooms_purity(item.path)]
    assert not wrong, "; ".join(map(str, wrong))


def rooms_purity(path: str) -> bool:
    return path not in FREE and rooms()[place_of(path)].is_pure


#: Rooms that start without torch, for daemons, parser processes and flag errors.
TORCH_FREE = (
    "bagpipe/errors.py",
    "bagpipe/util",
    "bagpipe/types",
    "bagpipe/schedule",
    "bagpipe/oracle",
    "bagpipe/partition",
    "bagpipe/config",
    "bagpipe/store",
    "bagpipe/client",
    "bagpipe/cli",
    "data",
    "cacher",
)


def test_torch_free_rooms_start_without_torch():
    """Checked in an interpreter, so indirect imports count."""
    names = [
        dotted_name(name_of(path))
        for path in modules()
        if name_of(path) not in FREE
        and rooms()[place_of(name_of(path))].path in TORCH_FREE
        and path.name != "__main__.py"
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_importing_the_library_is_light():
    """It imports the standard library only, and few modules of ours: the start-up cost of a user's program."""
    code = "import sys; before = set(sys.modules); import bagpipe; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250, check=True
    )
    modules = set(done.stdout.split())
    ours = {name for name in modules if name.partition(".")[0] == "bagpipe"}
    light = ("errors", "optim", "types", "types.row_record", "types.schema", "util", "util.documents")
    assert ours == {"bagpipe", *(f"bagpipe.{name}" for name in light)}
    assert not {name.partition(".")[0] for name in modules - ours} - sys.stdlib_module_names


@pytest.mark.parametrize("folder", [*OURS, "tests", "benchmarks", "tools", "examples"])
def test_files_stay_short(folder):
    lengths = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_every_module_has_a_docstring():
    programs = [path for path in modules() if path.name != "__main__.py"]
    assert not [name_of(path) for path in programs if not ast.get_docstring(syntax_of(path))]


def test_no_folder_holds_a_docstring_alone():
    contents = {path.parent: {item.name for item in path.parent.iterdir()} for path in modules()}
    assert not [folder for folder, names in contents.items() if names <= {"__init__.py", "__pycache__"}]


def test_entry_points_are_three_lines():
    for path in modules():
        if path.name == "__main__.py":
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            code = [line for line in lines if not line.startswith(('"""', "from __future__"))]
            assert len(code) <= 4, f"{name_of(path)} does more than call a main function"


def mirror_of(name: str) -> str:
    """Test file of a module: ``bagpipe/store/keys.py`` -> ``tests/store/test_keys.py``."""
    folder, _, file = name.removeprefix("bagpipe/").rpartition("/")
    return f"tests/{folder + '/' if folder else ''}test_{file}"


def test_tests_mirror_modules():
    names = {name_of(path) for path in modules() if not path.name.startswith("__")}
    missing = {name for name in names if not (ROOT / mirror_of(name)).exists()}
    assert not missing - NO_MIRROR.keys(), "modules without a mirrored test file"


def test_the_list_of_exceptions_is_not_stale():
    for name, covered_by in NO_MIRROR.items():
        assert (ROOT / name).exists(), f"{name} is gone"
        assert not (ROOT / mirror_of(name)).exists(), f"{name} has its mirrored test now"
        assert (ROOT / covered_by).exists(), f"{name} is said to be covered by {covered_by}, which is gone"


def test_nothing_sleeps():
    """Code waits for events with deadlines. (The linter forbids print.)"""
    code = {name_of(path): path.read_text(encoding="utf-8") for path in [*modules(), *(ROOT / "tests").rglob("*.py")]}
    assert not [name for name, text in code.items() if re.search(r"(?<![\w.])(time\.)?sleep\(", text)]
