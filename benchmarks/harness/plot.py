"""An SVG of one or more panels, the same bytes for the same figures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Axes", "log_log", "panels"]

#: A matplotlib axis: matplotlib is an optional dependency, so nothing here is typed by it.
Axes: TypeAlias = Any


@contextmanager
def panels(path: Path, count: int, *, size: tuple[float, float], columns: int = 0) -> Iterator[list[Axes]]:
    """Axes to draw on; written to `path` at the end.

    Args:
        path: of the SVG; its parent's name seeds the ids inside.
        count: number of panels.
        size: of the whole figure in inches.
        columns: panels in a row; 0: all of them.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.parent.name
    columns = columns or count
    figure, grid = pyplot.subplots(-(-count // columns), columns, figsize=size, squeeze=False)
    for axis in grid.flat[count:]:
        axis.set_visible(False)
    yield list(grid.flat[:count])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def log_log(axis: Axes, title: str, *, x: str, y: str = "") -> None:
    """Logarithmic axes with a grid and labels."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(visible=True, which="both", alpha=0.3)
