"""The programs beside the library: where their packages are, and how other processes run them.

    from a checkout   packages trainer, cacher, data beside the folder bagpipe       python -m trainer
    from a wheel      bagpipe.programs.trainer, …, copied by tools/build_wheel.py    bagpipe train

A wheel never puts a package called ``data`` into site-packages: it would hide a user's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from bagpipe.errors import InputError

__all__ = ["COMMANDS", "PROGRAMS", "command_of", "import_program", "module_command", "module_environment", "module_of"]

#: Packages of the programs in a checkout.
PROGRAMS = ("cacher", "data", "trainer")

#: Commands of ``bagpipe`` that are programs -> package, and first arguments.
COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "train": ("trainer", ()),
    "eval": ("trainer", ("eval",)),
    "predict": ("trainer", ("predict",)),
    "export": ("trainer", ("export",)),
    "apply": ("trainer", ("apply",)),
    "rows": ("trainer", ("rows",)),
    "cacher": ("cacher", ()),
    "data": ("data", ()),
}

#: The package of the programs in a wheel.
_INSTALLED = "bagpipe.programs"
_ROOT = Path(__file__).resolve().parents[2]


def module_of(program: str) -> str:
    """The package of one of `PROGRAMS`, for imports and ``python -m``."""
    return f"{_INSTALLED}.{program}" if _is_installed() else program


def command_of(command: str) -> str:
    """One of `COMMANDS` as a person types it: ``python -m trainer eval`` in a checkout, else ``bagpipe eval``."""
    if _is_installed():
        return f"bagpipe {command}"
    program, words = COMMANDS[command]
    return " ".join(("python -m", program, *words))


def import_program(program: str) -> ModuleType:
    """The module ``cli`` of a program.

    Raises:
        InputError: another package of that name hides the checkout's.
    """
    if not _is_installed():
        if str(_ROOT) not in (os.path.abspath(path) for path in sys.path):
            sys.path.append(str(_ROOT))
        for name in PROGRAMS:
            spec = find_spec(name)
            places = [] if spec is None else [Path(place).resolve() for place in spec.submodule_search_locations or ()]
            if _ROOT / name not in places:
                found = "none" if spec is None else spec.origin or places[0]
                raise InputError(
                    f"expected the package {name} of the checkout {_ROOT}, but Python finds {found}: run from the "
                    "checkout, or install bagpipe as a wheel, whose programs have names of their own"
                )
    return import_module(f"{module_of(program)}.cli")


def module_command(module: str) -> list[str]:
    """The command that runs a module in another process, with this interpreter and `module_environment`.

    ``-P``: the current directory may have modules of the same names.
    """
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """The environment of such a process: it finds the packages that this one finds."""
    path = [os.path.abspath(path) for path in sys.path]
    if not _is_installed() and str(_ROOT) not in path:
        path.append(str(_ROOT))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@cache
def _is_installed() -> bool:
    return find_spec(_INSTALLED) is not None
