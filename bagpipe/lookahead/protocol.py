"""The two ends of a conversation about plans, over any link that carries frames.

    training process: `requested_plans`                planner elsewhere: `serve_runs`
    START spec, BATCH ids, BATCH ids, …, END ──link──> window of batches ──plan──┐
    FramedPlan <── PLAN of rank 0, of rank 1, … │ MORE │ ERROR │ END <───────────┘

At most `max_held` batches are sent and not yet planned, so neither end waits for room that the other one does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from bagpipe.client.codec import CodecError
from bagpipe.errors import InputError
from bagpipe.lookahead.frames import FramedPlan, FrameKind, decode_error, decode_spec, encode_error, encode_spec
from bagpipe.lookahead.ids import decode_ids, encode_ids
from bagpipe.lookahead.link import Frame, LinkClosed
from bagpipe.lookahead.planning import Planned, planned_batches
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch

__all__ = ["SLACK", "FrameLink", "Intake", "requested_plans", "serve_runs"]

#: Batches read beyond the window. A batch has the time of so many steps for its way to the planner and back.
SLACK = 4


class FrameLink(Protocol):
    """One end of a link. One thread calls it."""

    def send(self, kind: int, run: int, parts: Sequence[Any] = ()) -> None:
        """Send a frame. `parts`: contiguous buffers, sent as one. Raises: as `receive`."""
        ...

    def receive(self) -> Frame:
        """The next frame; waits for it. Raises LinkClosed, or an error of the link's own: nothing comes any more."""
        ...


class Intake:
    """The frames of one run, as a planner understands them. This class trusts them.

    Args:
        start: the data of its START frame.

    Attributes:
        spec: what to plan for.
    """

    def __init__(self, start: bytearray) -> None:
        self.spec: OracleSpec = decode_spec(start)

    def batch(self, data: bytearray) -> Batch:
        """The batch in a frame.

        Raises:
            CodecError: the frame cannot be read.
            InputError: the batch cannot be planned.
        """
        return decode_ids(data)

    def planned(self, plan: Planned) -> None:
        """Note that the oldest batch has been planned."""


# ---- the end that brings batches -------------------------------------------------------------------------------------


def requested_plans(
    link: FrameLink,
    run: int,
    spec: OracleSpec,
    batches: Iterator[Batch],
    on_batch: Callable[[Batch], object],
    *,
    max_held: int,
) -> Generator[FramedPlan, None, Exception | None]:
    """The plans of a run's batches.

    Args:
        link: to the planner.
        run: number of the run; another one than those before.
        spec: what to plan for.
        batches: global batches, in order.
        on_batch: called with each batch whose plan will come.
        max_held: batches sent and not yet planned, at most; the window or more.

    Returns:
        The error of the batches, if they have one: raised by them, or found by the planner.

    Raises:
        CodecError: the planner does not keep to the protocol.
        LinkClosed: and other errors of the link.
    """
    link.send(FrameKind.START, run, [encode_spec(spec)])
    num_sent = num_planned = 0
    error: Exception | None = None
    has_more, limit, is_too_large = True, max_held, False
    parts: list[bytearray] = []  # of the next plan, by rank
    while True:
        while has_more and num_sent - num_planned < limit:
            try:
                batch = next(batches, None)
            except Exception as raised:
                error, batch = raised, None
            if batch is None:
                has_more = False
                link.send(FrameKind.END, run)
                break
            if not is_too_large:
                on_batch(batch)
            link.send(FrameKind.BATCH, run, encode_ids(batch))
            num_sent += 1
        frame = _of_run(link, run)
        if frame.kind == FrameKind.PLAN and num_planned < num_sent:
            parts.append(frame.data)
            if len(parts) == spec.world_size:
                num_planned += 1
                yield FramedPlan(parts=tuple(parts))
                parts = []
        elif frame.kind == FrameKind.ERROR:
            return decode_error(frame.data)
        elif frame.kind == FrameKind.MORE and not is_too_large:
            is_too_large, limit = True, limit + spec.lookahead
        elif frame.kind == FrameKind.END and not has_more and num_planned == num_sent:
            return error
        else:
            raise CodecError(f"frame of kind {frame.kind} after {num_planned} plans of {num_sent} batches")


def _of_run(link: FrameLink, run: int) -> Frame:
    """The next frame of a run; drops those of a run that was closed."""
    while (frame := link.receive()).run != run:
        pass
    return frame


# ---- the end that plans ----------------------------------------------------------------------------------------------


class _Cut(BaseException):
    """Ends a run at once. No error of its batches, before which all that have come would be planned."""


class _Superseded(_Cut):
    """Another run begins."""

    def __init__(self, start: Frame) -> None:
        super().__init__()
        self.start = start


class _Broken(_Cut):
    """Nothing can come any more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def serve_runs(link: FrameLink, intake: Callable[[bytearray], Intake] = Intake) -> NoReturn:
    """Serve run after run, until the link ends.

    Args:
        link: to the training process.
        intake: makes the intake of a run. Its InputErrors are those of the run.

    Raises:
        LinkClosed: the training process is gone. And other errors of the link.
        CodecError: what came cannot be read.
    """
    frame = link.receive()
    while True:
        try:
            if frame.kind == FrameKind.START:
                _Run(link, frame, intake).serve()
            frame = link.receive()  # the batches of a run that has failed are dropped
        except _Superseded as superseded:
            frame = superseded.start
        except _Broken as broken:
            raise broken.error from None


class _Run:
    """One stream of batches."""

    def __init__(self, link: FrameLink, start: Frame, intake: Callable[[bytearray], Intake]) -> None:
        self._link = link
        self._start = start
        self._make_intake = intake

    def serve(self) -> None:
        """Plan all batches, and send the plans."""
        try:
            intake = self._make_intake(self._start.data)
            for planned in planned_batches(
                make_planner(intake.spec), self._batches(intake), on_too_large=lambda: self._send(FrameKind.MORE)
            ):
                intake.planned(planned)
                for rank in range(intake.spec.world_size):
                    self._send(FrameKind.PLAN, planned.frame(rank))
        except InputError as error:
            self._send(FrameKind.ERROR, [encode_error(error)])
        else:
            self._send(FrameKind.END)

    def _batches(self, intake: Intake) -> Iterator[Batch]:
        while True:
            try:
                frame = self._link.receive()
                is_ours = frame.run == self._start.run
                batch = intake.batch(frame.data) if frame.kind == FrameKind.BATCH and is_ours else None
            except (LinkClosed, CodecError) as error:
                raise _Broken(error) from None
            if frame.kind == FrameKind.START:
                raise _Superseded(frame)
            if batch is not None:
                yield batch
            elif frame.kind == FrameKind.END and is_ours:
                return
            else:
                raise _Broken(CodecError(f"frame of kind {frame.kind}, of run {frame.run}, in run {self._start.run}"))

    def _send(self, kind: FrameKind, parts: Sequence[Any] = ()) -> None:
        self._link.send(kind, self._start.run, parts)
