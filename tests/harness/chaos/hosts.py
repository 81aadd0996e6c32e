"""`StoreHost` and `DaemonHost`: store and cacher processes that can be killed and restarted at the same address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bagpipe.errors import JobError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.harness.zygote import Started, Zygote

__all__ = ["DaemonHost", "StoreHost"]

_START_TIMEOUT_S = 20.0
_PROBE_S = 0.005


class StoreHost:
    """A store server with optional persistence. Context manager.

    Args:
        folder: for its data and its socket.
        durable: uses an append-only file, synced at each write; otherwise a killed server loses everything.
        data: folder of its files; None: in `folder`.
    """

    def __init__(self, folder: Path, *, durable: bool, data: Path | None = None) -> None:
        self.is_durable = durable
        self._folder = folder
        self._data = data or folder
        self._copy = folder / "copy"
        self._server: EmbeddedServer | None = None
        self._num_commands = 0
        self._last_commands = 0
        self.client = redis.Redis(
            unix_socket_path=str(folder / "store.sock"), socket_timeout=10, retry=Retry(NoBackoff(), 0)
        )

    @property
    def url(self) -> str:
        """Constant over restarts."""
        return f"unix://{self._folder / 'store.sock'}"

    @property
    def process_id(self) -> int:
        """Process id of the running server."""
        assert self._server is not None
        return self._server.process_id

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()

    def start(self) -> None:
        """Start the server on the files in its folder."""
        options = {"appendonly": "yes", "appendfsync": "always"} if self.is_durable else {}
        options |= {"dir": str(self._data), "enable-debug-command": "no"}
        self._server = EmbeddedServer(self._folder, options=options).__enter__()
        self._last_commands = 0

    def kill(self) -> None:
        """SIGKILL the server in any state."""
        if self._server is not None:
            self.signal(signal.SIGKILL)
            self._server.__exit__(None, None, None)
            self._server = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        assert self._server is not None
        with suppress(ProcessLookupError):  # the process has died by itself
            os.kill(self._server.process_id, number)  # not reaped yet, so the pid is still its own

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def answers(self) -> bool:
        """Whether the server runs and accepts commands."""
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def wipe(self) -> None:
        """Remove its files; it must not run."""
        shutil.rmtree(self._data / "appendonlydir", ignore_errors=True)

    def keep_copy(self) -> None:
        """Copy its files in their current state, possibly in the middle of a write."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._data / "appendonlydir", self._copy)

    def restore_copy(self) -> None:
        """Replace its files by the copy; it must not run."""
        self.wipe()
        shutil.copytree(self._copy, self._data / "appendonlydir")

    def num_commands(self) -> int:
        """Commands executed so far over all restarts; constant while the server does not answer."""
        with suppress(redis.RedisError):
            stats: Any = self.client.info("stats")
            now = int(stats["total_commands_processed"])
            self._num_commands += max(now - self._last_commands, 0)
            self._last_commands = now
        return self._num_commands

    def delete_row(self, choice: float) -> bool:
        """Delete one row of one bucket; False if there is none."""
        keys = self.client.scan_iter(match="*:{*}", count=1000)
        buckets = sorted(key for key in keys if self.client.type(key) == b"hash")
        if not buckets:
            return False
        bucket = buckets[int(choice * len(buckets))]
        fields = sorted(self.client.hkeys(bucket))
        return bool(fields) and self.client.hdel(bucket, fields[int(choice * 1e6) % len(fields)]) == 1

    def limit_memory(self, policy: str, share: float) -> None:
        """Limit its memory to a share of its current use."""
        used: Any = self.client.info("memory")
        self.client.config_set("maxmemory-policy", policy)
        self.client.config_set("maxmemory", max(int(used["used_memory"] * share), 1))

    def heal(self) -> None:
        """Restart it if needed, and remove the memory limit."""
        if self._server is None or not self.answers():
            self.restart()
        self.client.config_set("maxmemory", 0)
        self.client.config_set("maxmemory-policy", "noeviction")


class DaemonHost:
    """A forked cacher daemon on a unix socket. Context manager.

    Args:
        zygote: forks the daemon.
        arguments: of the job.
        folder: for its socket and its streams.
    """

    def __init__(self, zygote: Zygote, arguments: Sequence[str], folder: Path) -> None:
        self._zygote = zygote
        self._arguments = list(arguments)
        self._folder = folder
        self._path = folder / "cacher.sock"
        self._started: Started | None = None

    @property
    def url(self) -> str:
        """Constant over restarts."""
        return f"unix:{self._path}"

    @property
    def process_id(self) -> int:
        """Process id of the running daemon."""
        assert self._started is not None
        return self._started.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Fork it and wait until it listens."""
        self._path.unlink(missing_ok=True)
        self._started = self._zygote.start(
            "cacher.cli",
            [*self._arguments, "--listen", self.url, "--log-level", "error"],
            streams=self._folder / "daemon",
        )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():
            if self._started.has_ended(_PROBE_S) or time.monotonic() > deadline_s:
                raise JobError(f"the daemon did not start: {self._started.error_lines()[-1:]}")

    def kill(self) -> None:
        """SIGKILL."""
        if self._started is not None:
            self._started.signal(signal.SIGKILL)
            self._zygote.reap(self._started)
            self._started = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        assert self._started is not None
        self._started.signal(number)

    def heal(self) -> None:
        """Restart it if needed."""
        if self._started is None or self._started.has_ended():
            self.kill()
            self.start()

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(str(self._path))
            return True
        return False
