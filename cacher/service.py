"""Serves one trainer over a connected socket: the cacher's side of `bagpipe.proto`.

    main thread: plan ──bounded queue (2 steps)──> sender thread ──credit──> socket
    reader thread: Ack -> one more credit; closed socket -> stop

Credits bound what is under way; the queue lets the next step be planned while the last one is being sent.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from bagpipe.client.step import Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.proto.channel import Channel, Frame, Kind
from bagpipe.proto.codec import encode_step
from cacher.planning import PlannedData

__all__ = ["serve"]

_STEPS_PLANNED_AHEAD = 2
#: How errors are named on the wire; the client raises the class of this name.
_ERROR_NAMES: Mapping[type[Exception], str] = {CapacityError: "CapacityError", InputError: "InputError"}


class _PeerClosed(Exception):
    """The trainer is gone."""


def serve(channel: Channel) -> None:
    """Answer one trainer until it closes the channel. Errors travel to the trainer; it decides what they mean."""
    requests: queue.Queue[Frame | None] = queue.Queue()
    credits = threading.Semaphore(0)
    closed = threading.Event()
    reader = threading.Thread(
        target=_read, args=(channel, requests, credits, closed), name="cacher-reader", daemon=True
    )
    reader.start()
    try:
        _answer(channel, requests, credits, closed)
    except (_PeerClosed, ConnectionError):
        pass  # the trainer left; there is nobody to tell
    finally:
        channel.close()
        reader.join()


def _answer(
    channel: Channel, requests: queue.Queue[Frame | None], credits: threading.Semaphore, closed: threading.Event
) -> None:
    data: PlannedData | None = None
    while (request := requests.get()) is not None:
        try:
            if request.kind is Kind.OPEN:
                value = request.json()
                data = PlannedData(DataConfig(**value["data"]), value["seed"])
                channel.send_json(Kind.SCHEMA, data.schema.to_json())
            elif request.kind is Kind.START and data is not None:
                value = request.json()
                spec = spec_from_json(value["spec"])
                steps = data.steps(value["phase"], spec, max_steps=value["max_steps"])
                _stream(channel, steps, credits, closed)
                channel.send_json(Kind.END, {"skipped_rows": data.skipped_rows()})
            else:
                raise InputError(f"unexpected {request.kind.name} frame")
        except (_PeerClosed, ConnectionError):
            raise
        except Exception as error:  # whatever went wrong, the trainer must hear of it rather than wait
            name = _ERROR_NAMES.get(type(error), "JobError")
            message = str(error) if name != "JobError" else f"the cacher failed: {type(error).__name__}: {error}"
            channel.send_json(Kind.ERROR, {"name": name, "message": message})


def _stream(channel: Channel, steps: Iterator[Step], credits: threading.Semaphore, closed: threading.Event) -> None:
    planned: queue.Queue[bytearray | BaseException | None] = queue.Queue(maxsize=_STEPS_PLANNED_AHEAD)
    stop = threading.Event()
    planner = threading.Thread(target=_plan, args=(steps, planned, stop), name="cacher-planner", daemon=True)
    planner.start()
    try:
        while (item := planned.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            credits.acquire()
            if closed.is_set():
                raise _PeerClosed
            channel.send(Kind.STEP, item)
    finally:
        stop.set()
        while planner.is_alive():
            _drain(planned)
            planner.join(timeout=0.05)


def _plan(steps: Iterator[Step], planned: queue.Queue[bytearray | BaseException | None], stop: threading.Event) -> None:
    try:
        for step in steps:
            if stop.is_set():
                return
            planned.put(encode_step(step))
        planned.put(None)
    except BaseException as error:  # handed to the sending thread, which raises it
        planned.put(error)
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()


def _drain(planned: queue.Queue[Any]) -> None:
    try:
        while True:
            planned.get_nowait()
    except queue.Empty:
        pass


def _read(
    channel: Channel, requests: queue.Queue[Frame | None], credits: threading.Semaphore, closed: threading.Event
) -> None:
    try:
        while (frame := channel.receive()) is not None:
            if frame.kind is Kind.ACK:
                credits.release()
            elif frame.kind is Kind.OPEN:
                credits.release(frame.json()["credits"])
                requests.put(frame)
            else:
                requests.put(frame)
    except (OSError, KeyError, TypeError, ValueError):
        pass  # nonsense (ChannelError among it) is treated as a closed peer
    finally:
        closed.set()
        requests.put(None)
        credits.release()  # wakes a sender that waits for a credit


def spec_from_json(value: dict[str, Any]) -> OracleSpec:
    """The inverse of `dataclasses.asdict` on an `OracleSpec`."""
    known = {field.name for field in dataclasses.fields(OracleSpec)}
    if set(value) != known:
        raise InputError(f"expected an oracle spec with {sorted(known)}, got {sorted(value)}")
    return OracleSpec(
        **{
            **value,
            "table_rows": tuple(value["table_rows"]),
            "features": tuple(FeatureRef(**ref) for ref in value["features"]),
        }
    )
