"""The process of one writer: it opens a fenced store and does what a socket asks for, so that it can be killed alone.

Hand ──{"append": {row: list}} | {"read": rows} | {"rotate": true}──> main: store.write | read | rotate
     <──{"phase": "ok", "lists": …, "torn": …, "groups": …} | {"phase": "unknown" | "fail", "error": …}──
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.errors import CorruptRowError, FencedError, InputError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from tests.harness.histories.broken import DEFECTS
from tests.harness.histories.events import Phase
from tests.harness.histories.rows import SCHEMA, decode, encode
from tests.harness.zygote import Started, Zygote

__all__ = ["Hand", "main", "read_lists"]

#: A process that is asked for something answers or ends within this time. It may be stopped during a whole takeover.
_PATIENCE_S = 300.0
_UNKNOWN = {"phase": Phase.UNKNOWN.value, "error": "the process has ended"}


class Hand:
    """The writer's side of a process. Context manager; used by one thread, but `signal` by any.

    Args:
        zygote: forks the process.
        folder: for its socket and streams.
        name: of the writer, unique in the folder.
        options: of the store: url, namespace, buckets, timeout_s, durability; and token, writer, defect (see
            `tests.harness.histories.broken`; empty: none).
    """

    def __init__(self, zygote: Zygote, folder: Path, name: str, options: Mapping[str, Any]) -> None:
        self._zygote = zygote
        path = folder / f"{name}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(_PATIENCE_S)
            arguments = [str(path), json.dumps(dict(options))]
            self._process: Started = zygote.start(__name__, arguments, streams=folder / name)
            self._socket, _ = listener.accept()
        self._socket.settimeout(_PATIENCE_S)
        self._answers = self._socket.makefile("rb")

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of the process; that of an unknown outcome if it ends before it answers."""
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._answers.readline()
        except ConnectionError:
            line = b""
        return dict(json.loads(line)) if line.endswith(b"\n") else dict(_UNKNOWN)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.signal(number)

    def close(self) -> None:
        """Kill the process and reap it. Called by the thread that started it."""
        self._process.signal(signal.SIGKILL)
        self._zygote.reap(self._process)
        self._answers.close()
        self._socket.close()


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket is closed."""
    path, options = arguments[0], json.loads(arguments[1])
    fence = Fence(token=options.pop("token"), writer=options.pop("writer"), epoch=1)
    defect = options.pop("defect")
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        with channel.makefile("rb") as requests:
            try:
                with open_store(schema=SCHEMA, **options) as whole:
                    store: Store = DEFECTS[defect](whole) if defect else whole
                    store.fence(fence)
                    server = _Server(store)
                    for line in requests:
                        channel.sendall(json.dumps(server.answer(json.loads(line))).encode() + b"\n")
            except (InputError, StoreError) as error:  # the store cannot be opened
                for _ in requests:
                    answer = {"phase": Phase.FAIL.value, "error": str(error)}
                    channel.sendall(json.dumps(answer).encode() + b"\n")


class _Server:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_refused = False

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if "append" in request:
                rows = {int(row): numbers for row, numbers in request["append"].items()}
                self._store.write(0, np.array(list(rows), np.int64), encode(list(rows.values())))
                return {"phase": Phase.OK.value}
            if "read" in request:
                return read_lists(self._store, request["read"])
            return {"phase": Phase.OK.value, "groups": self._store.rotate().tolist()}
        except (FencedError, RolledBackError) as error:
            # A refused store sends nothing any more. The first refusal may be that of a write that was sent twice.
            phase = Phase.FAIL if self._is_refused else Phase.UNKNOWN
            self._is_refused = True
            return {"phase": phase.value, "error": str(error), "refused": True}
        except StoreError as error:
            return {"phase": Phase.UNKNOWN.value, "error": str(error)}


def read_lists(store: Store, rows: Sequence[int]) -> dict[str, Any]:
    """Facts of an acknowledged read of rows. Raises StoreError."""
    try:
        lists, torn = decode(rows, store.read(0, np.array(rows, np.int64)))
    except CorruptRowError:
        lists, torn = {}, list(rows)
    return {"phase": Phase.OK.value, "lists": lists, "torn": torn}
