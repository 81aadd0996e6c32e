"""`OrderedExchanges`: exchanges of one group, in the order in which they are asked for, beside the computation.

    compute lane: submit(exchange) ──> thread, one exchange after the other (CPU)       ──> `Ticket.wait`
                                  └──> stream, behind what the current one has (CUDA)   ──> the current stream waits

All ranks submit the same exchanges in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

__all__ = ["OrderedExchanges", "Ticket"]


class Ticket:
    """An exchange that was asked for."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._event: Any = None

    def wait(self) -> None:
        """Wait for its end; on CUDA the current stream does.

        Raises:
            PeerError: a peer is gone or silent, in this exchange or an earlier one.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def finish(self, error: BaseException | None = None, event: Any = None) -> None:
        """The exchange has ended, or was enqueued before an event."""
        self._error, self._event = error, event
        self._done.set()


class OrderedExchanges:
    """Use as a context manager. One thread at a time submits.

    Args:
        device: of the tensors.
        name: of the thread.
        limit: most exchanges that wait.
    """

    def __init__(self, device: torch.device, *, name: str, limit: int) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[tuple[Callable[[], None], Ticket] | None] = queue.Queue(maxsize=limit + 1)
        self._worker = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._worker.join()  # bounded: its exchanges have a deadline

    def submit(self, exchange: Callable[[], None]) -> Ticket:
        """Ask for an exchange. Its tensors stay as they are until the ticket's end."""
        ticket = Ticket()
        if self._stream is None:
            self._queue.put((exchange, ticket))
            return ticket
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            exchange()
            ticket.finish(event=self._stream.record_event())
        return ticket

    def _work(self) -> None:
        first: BaseException | None = None
        while (item := self._queue.get()) is not None:
            exchange, ticket = item
            if first is None:
                try:
                    exchange()
                except BaseException as error:  # `Ticket.wait` raises it
                    first = error
            ticket.finish(first)
