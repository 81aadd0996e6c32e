"""`print_once`: the error line of a job of several ranks, printed by rank 0 alone.

    rank 0        prints its error ──────────────> key "printed"
    rank r        its error ─────────────────────> key "failure": rank 0 ends with it if it has none of its own
                  waits for "printed" <──────────  the same error: silent.  Another, or none in time: prints its own

No error is lost: a rank prints its own line unless it knows that rank 0 has printed it. The store must outlive the
ranks, so without a launcher that hosts it every rank prints.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from bagpipe.distributed.failure import FAILURE_KEY, POLL_S, STORE_ERRORS, Failure
from bagpipe.distributed.keystore import KeyStore, connect
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError, JobError, PeerError, StoreError

__all__ = ["print_once"]

_PRINTED_KEY = "printed"
#: How long rank 0 may take to learn of another rank's failure, to clean up and to print it.
_WAIT_S = 10.0
#: Deadline of a connection and of a response. The store is there already, or will not come.
_STORE_TIMEOUT_S = 2.0


def print_once(membership: Membership, error: BaseException, write: Callable[[BaseException], None]) -> None:
    """Print the error that ends this rank, unless rank 0 prints it.

    A defect is printed by its own rank too, because only that has its traceback.

    Args:
        membership: this rank.
        error: its error.
        write: prints an error.
    """
    if not membership.store_is_launchers:
        write(error)
        return
    is_first = membership.rank == 0
    is_expected = isinstance(error, (InputError, StoreError, JobError))
    is_printed = is_first or not is_expected
    if is_printed:
        write(error)  # first of all: what follows can take seconds
    own = Failure.of(membership.rank, error)
    # ImportError: torch can be what is wrong. OSError: there is no store.
    with suppress(*STORE_ERRORS, OSError, ImportError):
        # torch's client would print warnings about a store that is gone.
        socket.create_connection((membership.address, membership.port), _STORE_TIMEOUT_S).close()
        client = connect(membership, is_master=False, timeout_s=_STORE_TIMEOUT_S)
        with KeyStore(client, _STORE_TIMEOUT_S) as store:
            if is_first:
                store.set(_PRINTED_KEY, json.dumps(asdict(own)))
            else:
                store.compare_set(FAILURE_KEY, "", json.dumps(asdict(own)))
                printed = _await_printed(store)
                # A PeerError is a consequence of another rank's error. Its text can differ between ranks.
                is_same = printed is not None and (isinstance(error, PeerError) or printed.cause == own.cause)
                is_printed = is_printed or is_same
    if not is_printed:
        write(own.error())


def _await_printed(store: KeyStore) -> Failure | None:
    """The error that rank 0 has printed; None if it prints none in time."""
    waiter = threading.Event()
    deadline_s = time.monotonic() + _WAIT_S
    while not store.check([_PRINTED_KEY]):
        if time.monotonic() > deadline_s:
            return None
        waiter.wait(POLL_S)
    return Failure(**json.loads(store.get(_PRINTED_KEY)))
