"""`LoaderState`: the state of a user's loader, if it keeps one.

A loader has a state if both of its methods, ``state_dict`` and ``load_state_dict``, are there and the first one works.
Some loaders have methods that raise, because what they wrap has no state: their position is the number of batches that
are taken.
"""

from __future__ import annotations

from typing import Any

from bagpipe.util.program import note

__all__ = ["LoaderState"]


class LoaderState:
    """Reads the state of one loader. One thread at a time.

    Args:
        loader: any iterable.
        noted: texts of the notes that are printed; no note is printed again.

    Attributes:
        is_kept: the loader has the methods, and the first one has not failed at its first call.
    """

    def __init__(self, loader: Any, noted: set[str]) -> None:
        self._loader = loader
        self._noted = noted
        self.is_kept = all(callable(_attribute(loader, name)) for name in ("state_dict", "load_state_dict"))
        self._has_worked = False

    def read(self) -> Any:
        """The state after the batch that the loader has yielded last; None: it keeps none.

        Raises:
            Exception: that of a loader which has given its state before.
        """
        if not self.is_kept:
            return None
        try:
            state = self._loader.state_dict()
        except Exception as error:
            if self._has_worked:
                raise
            self.is_kept = False
            why = " ".join(f"{type(error).__name__}: {error}".split())
            text = (
                f"state_dict of the {type(self._loader).__name__} fails ({why}): its batches are counted, and a resume "
                "leaves out those that are trained"
            )
            if text not in self._noted:
                self._noted.add(text)
                note(text)
            return None
        self._has_worked = True
        return state

    def load(self, state: Any) -> None:
        """Set the loader back to a state."""
        self._loader.load_state_dict(state)


def _attribute(loader: Any, name: str) -> Any:
    """An attribute; None if there is none, or it cannot be read."""
    try:
        return getattr(loader, name, None)
    except Exception:
        return None
