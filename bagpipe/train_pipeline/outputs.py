"""`Outputs`: what a model returns, batch by batch. Says so if nobody asks for a batch: then nothing was computed.

loader ──iterable: can it be iterated?──> trained, evaluation.evaluate ──a batch for each output──> Outputs
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Self

from bagpipe.errors import InputError
from bagpipe.train_pipeline.error_texts import speaks_arguments
from bagpipe.train_pipeline.session import Session

__all__ = ["Outputs", "iterable", "trained"]

_END = object()


@speaks_arguments
class Outputs(Iterator[Any]):
    """An iterator over outputs; closing it ends the work early.

    Args:
        outputs: computes a batch for each output.
        call: that gave them, such as ``train``.
        table_names: names of the tables, for errors.
        pipeline: computes the batches. It is kept, as it is closed when nobody refers to it.
    """

    def __init__(
        self, outputs: Generator[Any, None, None], call: str, table_names: Sequence[str], pipeline: object
    ) -> None:
        self._pipeline = pipeline
        self._outputs = outputs
        self._call = call
        self._table_names = table_names
        self._is_used = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._is_used = True
        return next(self._outputs)

    def close(self) -> None:
        """End the work; batches without an output are left out."""
        self._is_used = True
        self._outputs.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True):
            warnings.warn(
                f"pipeline.{self._call}(loader) was not iterated, so no batch was computed: write "
                f"for outputs in pipeline.{self._call}(loader)",
                RuntimeWarning,
                stacklevel=2,
            )


def iterable(loader: Any, call: str) -> Iterable[Any]:
    """A loader as it is.

    Raises:
        InputError: it cannot be iterated; `call` is what has got it.
    """
    if not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
        hint = "; pipeline.model.train() sets the mode of the model" if call == "train" else ""
        raise InputError(f"{call} needs a loader, an iterable of batches, got {type(loader).__name__}{hint}")
    found: Iterable[Any] = loader
    return found


def trained(session: Session, loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Outputs of the batches of a loader, each trained when it is asked for.

    A resumed session leaves out the batches that are trained already, unless the loader does. Closing the generator
    makes room for another loader.

    Raises: see `TrainPipeline.train`.
    """
    taken = session.resume(loader)
    iterator = iter(loader)
    for number in range(taken):
        if next(iterator, _END) is _END:
            raise InputError(f"expected a loader with the {taken} batches that are trained already, got {number}")
    try:
        while True:
            outputs, has_ended = session.step_on(iterator)
            if has_ended:
                return
            yield outputs
    finally:
        session.abandon(iterator)
