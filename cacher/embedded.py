"""`EmbeddedCacher`: a cacher daemon as a child process of the job that starts it.

    trainer ──Popen──> python -m cacher --listen … (own process group: only the trainer gets Ctrl-C)
            <──url── ready pipe                     stdin pipe: the kernel closes it when the trainer ends

A separate process, because planning and parsing would hold the trainer's interpreter lock.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from bagpipe.client.agreement import settings_of
from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError
from bagpipe.util.documents import parse_json
from bagpipe.util.lasting_thread import in_lasting_thread
from bagpipe.util.priority import lower_process_priority
from bagpipe.util.programs import module_command, module_environment, module_of
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["EmbeddedCacher"]

_STOP_TIMEOUT_S = 10.0
_SOCKET = "cacher.sock"


class EmbeddedCacher:
    """Context manager: runs `python -m cacher` for one job.

    Args:
        config: of the job.
        listen: unix:PATH or HOST:PORT (port 0: any). Empty: a unix socket that only this user can reach.
        secret: shared with the trainers; required if other machines can connect.

    Attributes:
        url: its address, once entered.
    """

    def __init__(self, config: Config, *, listen: str = "", secret: str = "", in_background: bool = True) -> None:
        self.url = ""
        self._config = config
        self._listen = listen
        self._secret = secret
        self._in_background = in_background
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ExitStack()

    def __enter__(self) -> Self:
        """Start the daemon and wait until it listens.

        Raises:
            InputError: it cannot open the data or the listener.
            JobError: it ended without a message.
        """
        try:
            self._start()
        except (InputError, JobError):  # it ends, or has ended
            self._stop()
            raise
        except BaseException:
            if self._process is not None:
                self._process.terminate()  # it looks at its standard input once it serves
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int | None:
        """Process id of the daemon; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """The daemon was started and has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url}, pid={self.pid})"

    def _start(self) -> None:
        folder = self._folder.enter_context(temporary_folder("cacher", socket_name=_SOCKET))
        read_end, write_end = os.pipe()
        with open(read_end, encoding="utf-8") as ready:
            try:
                # A signal handler's exception can interrupt this thread, but not the one that gets the process.
                in_lasting_thread(partial(self._spawn, folder, write_end))
            finally:
                os.close(write_end)
            said = ready.read()
        if not said:
            raise JobError("the cacher process ended unexpectedly")
        answer = parse_json(said)
        if "error" in answer:
            raise InputError(answer["error"])
        self.url = answer["url"]

    def _spawn(self, folder: Path, write_end: int) -> None:
        self._process = subprocess.Popen(
            [*module_command(module_of("cacher")), *self._arguments(folder), "--ready-fd", str(write_end)],
            pass_fds=[write_end],
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Only the trainer handles signals to its process group (Ctrl-C).
            process_group=0,
        )
        if self._in_background:
            lower_process_priority(self._process)

    def _arguments(self, folder: Path) -> list[str]:
        arguments = ["--listen", self._listen or f"unix:{folder / _SOCKET}", "--log-level", "error"]
        if self._secret:
            file = folder / "secret"  # not an argument: every user can read those
            file.touch(mode=0o600)
            file.write_text(self._secret)
            arguments += ["--secret-file", str(file)]
        keys = {**settings_of(self._config), "data.workers": self._config.data.workers, **_shard_keys(self._config)}
        if self._config.checkpoint.dir:
            keys["checkpoint.dir"] = self._config.checkpoint.dir  # the rows with which the job begins
        return arguments + [f"--{key}={_as_flag(value)}" for key, value in keys.items()]

    def _stop(self) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.close()


def _shard_keys(config: Config) -> dict[str, object]:
    """Keys that a cacher with shards needs."""
    names = ("shards", "shard_tables", "secret_file", "tls_ca", "tls_cert", "tls_key", "timeout_s")
    return {f"cacher.{name}": getattr(config.cacher, name) for name in names} if config.cacher.shards else {}


def _as_flag(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
