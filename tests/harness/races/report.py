"""`Use` and `Race`: readable reports of races. `where` finds the calling code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Place", "Race", "Use", "where"]

_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[3])
_LANE = str(Path("pipeline") / "lane.py")
_MAX_FRAMES = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Place in the program.

    Attributes:
        action: of the lane, with its index, such as ``0F3``; empty outside of actions.
        frames: of the project's code, innermost first: file, line, function.
    """

    action: str
    frames: tuple[str, ...]


def where() -> Place:
    """Place of the caller."""
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_LANE) and code.co_name == "_act":
            head, colon, peer = frame.f_locals["step"].text.partition(":")
            return Place(f"{head}{frame.f_locals['index']}{colon}{peer}", tuple(frames))
        is_ours = code.co_filename.startswith(_ROOT) and "site-packages" not in code.co_filename
        is_detector = code.co_filename.startswith(_HERE) and not Path(code.co_filename).name.startswith("test_")
        if is_ours and not is_detector and len(frames) < _MAX_FRAMES:
            frames.append(f"{code.co_filename.removeprefix(_ROOT + '/')}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return Place("", tuple(frames))


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One memory access.

    Attributes:
        agent: the stream or thread.
        operator: such as ``aten::copy_``.
        shape: of the tensor.
        writes: whether it wrote.
        place: of the call.
    """

    agent: str
    operator: str
    shape: tuple[int, ...]
    writes: bool
    place: Place

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        at = f" in {self.place.action}" if self.place.action else ""
        frames = "".join(f"\n      {frame}" for frame in self.place.frames)
        return f"{self.agent}{at}: {self.operator} {verb} {list(self.shape)}{frames}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two unordered accesses of the same memory.

    Attributes:
        first, second: in the order they were recorded, that of the host's calls.
        is_reuse: the memory was freed after `first`, and `second` is where its allocator can hand it out again;
            otherwise both access the same tensor's memory.
    """

    first: Use
    second: Use
    is_reuse: bool = False

    @property
    def actions(self) -> tuple[str, str]:
        """Actions of both accesses, without their indices: ``0X_INSERT``."""
        return _op(self.first.place.action), _op(self.second.place.action)

    def __str__(self) -> str:
        words = "memory given back while it is in use" if self.is_reuse else "race"
        return f"{words}:\n    {self.first}\n  is not ordered before\n    {self.second}"


def _op(action: str) -> str:
    head, colon, peer = action.partition(":")
    return f"{head.rstrip('0123456789')}{colon}{peer}"
