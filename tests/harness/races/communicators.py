"""Ordering by communicators, for ranks that are threads (`bagpipe.testing.local_peers`).

exchange, sum    each rank's stream continues after the others' earlier work, and after they have read its data
number, word     the threads synchronise
send, receive    a stream of the link's own, after both ranks' streams; a wait for the transfer waits on that stream
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bagpipe.testing import local_links, local_peers
from tests.harness.races.device import ModelledCuda, ModelledEvent
from tests.harness.races.history import History

__all__ = ["model_communicators"]


@contextmanager
def model_communicators(history: History, cuda: ModelledCuda) -> Iterator[None]:
    """Model the ordering of device communicators for ranks in threads while the context is active."""
    with ExitStack() as stack:
        for change in (_rendezvous_ordering(history, cuda), *_transfers(cuda)):
            stack.enter_context(change)
        yield


def _rendezvous_ordering(history: History, cuda: ModelledCuda) -> AbstractContextManager[object]:
    original = local_peers._Rendezvous.meet

    def point(tensors: bool) -> ModelledEvent:
        event = cuda.Event()
        if tensors:
            event.record()
        else:
            event.clock = history.knowledge()
        return event

    def arrive(tensors: bool, points: list[ModelledEvent]) -> None:
        for event in points:
            if tensors:
                event.wait()
            else:
                event.synchronize()

    @contextmanager
    def meet(place: Any, position: int, value: Any) -> Iterator[list[Any]]:
        tensors = isinstance(value, (Tensor, tuple))
        with original(place, position, (value, point(tensors))) as brought:
            arrive(tensors, [event for _, event in brought])
            yield [theirs for theirs, _ in brought]
        # After the second point the data has been read: the sender can reuse its memory.
        with original(place, position, point(tensors)) as points:
            arrive(tensors, points)

    return patch.object(local_peers._Rendezvous, "meet", meet)


def _transfers(cuda: ModelledCuda) -> Iterator[AbstractContextManager[object]]:
    begin, match, wait = local_links._Transfer.__init__, local_links.Mail._match, local_links.Mail.wait
    link = cuda.Stream()

    def begin_on_stream(transfer: Any, *args: Any) -> None:
        begin(transfer, *args)
        transfer.begun, transfer.done = cuda.Event(), cuda.Event()
        transfer.begun.record()

    def match_on_link(mail: Any, sent: Any, wanted: Any) -> None:
        with cuda.stream(link):
            sent.begun.wait()
            wanted.begun.wait()
            match(mail, sent, wanted)
            for transfer in (sent, wanted):
                transfer.done.record()

    def wait_on_stream(mail: Any, transfer: Any, words: str) -> None:
        wait(mail, transfer, words)
        transfer.done.wait()

    yield patch.object(local_links._Transfer, "__init__", begin_on_stream)
    yield patch.object(local_links.Mail, "_match", match_on_link)
    yield patch.object(local_links.Mail, "wait", wait_on_stream)
