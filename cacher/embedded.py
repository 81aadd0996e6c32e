"""`EmbeddedCacher`: a daemon that lives and dies with the job that started it; the same program as any other daemon.

    trainer ──Popen──> python -m cacher --listen … (own process group: Ctrl-C is the trainer's to answer)
            <──url── ready pipe                     stdin pipe: the kernel closes it when the trainer is gone

A process of its own, because planning and parsing would otherwise take the trainer's interpreter lock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from bagpipe.client.agreement import settings_of
from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError

__all__ = ["EmbeddedCacher"]

_STOP_TIMEOUT_S = 10.0


class EmbeddedCacher:
    """Context manager that runs `python -m cacher` for one job.

    Args:
        config: what to read and plan for.
        listen: unix:PATH or HOST:PORT (port 0: any). Empty: a unix socket that only this user can reach.
        secret: what its trainers must know; needed where other machines can connect.

    Attributes:
        url: where it listens, once entered.
    """

    def __init__(self, config: Config, *, listen: str = "", secret: str = "") -> None:
        self.url = ""
        self._config = config
        self._listen = listen
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ExitStack()

    def __enter__(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            InputError: it cannot open the data, or listen there.
            JobError: it ended without a word.
        """
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int | None:
        """Of the daemon's process; None before it was started."""
        return None if self._process is None else self._process.pid

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url}, pid={self.pid})"

    def _start(self) -> None:
        folder = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-cacher-")))
        read_end, write_end = os.pipe()
        with open(read_end, encoding="utf-8") as ready:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "cacher", *self._arguments(folder), "--ready-fd", str(write_end)],
                    pass_fds=[write_end],
                    env={**os.environ, "PYTHONPATH": _python_path()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    # Signals sent to the trainer's process group (Ctrl-C) are the trainer's to answer.
                    process_group=0,
                )
            finally:
                os.close(write_end)
            said = ready.read()
        if not said:
            raise JobError("the cacher process ended unexpectedly")
        answer = json.loads(said)
        if "error" in answer:
            raise InputError(answer["error"])
        self.url = answer["url"]

    def _arguments(self, folder: Path) -> list[str]:
        arguments = ["--listen", self._listen or f"unix:{folder / 'cacher.sock'}", "--log-level", "error"]
        if self._secret:
            file = folder / "secret"  # not an argument: those are there for all to read
            file.touch(mode=0o600)
            file.write_text(self._secret)
            arguments += ["--secret-file", str(file)]
        keys = {**settings_of(self._config), "data.workers": self._config.data.workers}
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


def _as_flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _python_path() -> str:
    """Programs are folders of the checkout, not installed: the child must find them as we did."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
