"""Every way in which a program ends or pauses a pipeline: signals, other threads and processes, and no `close`."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import bagpipe
from bagpipe.errors import JobError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.relays import OnReadable, SocketRelay, close_pair
from tests.train_pipeline.rank_jobs import made, on_ranks, shard
from tests.train_pipeline.small import FEATURES, ROWS, Small, assert_same, batches, pipeline, progress_all, state_of

#: Training in which a signal comes has as many steps.
STEPS = 8


class _Stop(BaseException):
    """What a handler raises."""


@contextmanager
def _handled(number: int, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside, the handler of a signal raises, after a call."""

    def handler(number: int, frame: FrameType | None) -> None:
        then()
        raise _Stop

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        assert signal.getsignal(number) is handler
        signal.signal(number, before)


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)


class Signalled(Small):
    """Sends a signal in the middle of one forward."""

    send: Callable[[], None] | None = None

    def forward(self, batch: Any) -> Any:
        if self.send is not None and batch["labels"][0] == -1:
            send, self.send = self.send, None
            send()
        return super().forward(batch)


def _batches() -> list[Any]:
    made = batches(STEPS)
    made[3]["labels"][0] = -1
    return made


def _expected() -> dict[str, torch.Tensor]:
    with pipeline() as trained:
        progress_all(trained, iter(_batches()))
        return state_of(trained)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD])
@pytest.mark.parametrize("planner", ["inline", "process"])
def test_a_signal_is_handled_between_two_steps(number: int, planner: str) -> None:
    model = Signalled()
    with pipeline(model, planner=planner) as trained, _handled(number):
        model.send = lambda: _kill(number)
        iterator = iter(_batches())
        with pytest.raises(_Stop):
            progress_all(trained, iterator)
        assert trained.step == 4
        progress_all(trained, iterator)
        assert_same(state_of(trained), _expected())


def test_after_a_signal_another_loop_begins() -> None:
    model = Signalled()
    with pipeline(model) as trained, _handled(signal.SIGINT):
        model.send = lambda: _kill(signal.SIGINT)
        with pytest.raises(_Stop):
            list(trained.train(_batches()))
        list(trained.train(_batches()[4:]))
        assert_same(state_of(trained), _expected())


def test_a_second_request_to_stop_ends_a_step_that_hangs() -> None:
    model = Signalled()

    def hang() -> None:
        _kill(signal.SIGINT)
        _kill(signal.SIGINT)
        raise AssertionError("it is not interrupted")

    with pipeline(model) as trained, _handled(signal.SIGINT):
        model.send = hang
        with pytest.raises(_Stop):
            progress_all(trained, iter(_batches()))
        with pytest.raises(JobError, match="the pipeline has failed: _Stop"):
            trained.flush()


@pytest.mark.parametrize("call", ["progress", "evaluate"])
def test_a_signal_ends_the_wait_for_a_batch(call: str) -> None:
    comes = threading.Event()

    def waiting() -> Iterator[Any]:
        made = _batches()
        yield from made[:2]
        _kill(signal.SIGINT)
        assert comes.wait(60)
        yield from made[2:]

    with pipeline(lookahead=1) as trained, _handled(signal.SIGINT, comes.set):
        iterator = iter(waiting())
        work = progress_all if call == "progress" else lambda trained, iterator: list(trained.evaluate(iterator))
        with pytest.raises(_Stop):
            work(trained, iterator)
        progress_all(trained, iterator if call == "progress" else iter(_batches()))
        assert_same(state_of(trained), _expected())


class Tracked:
    """Its state is asked for in the middle of a call."""

    is_sending = True

    def state_dict(self) -> dict[str, Any]:
        if self.is_sending:
            self.is_sending = False
            _kill(signal.SIGINT)
        return {}


CALLS: dict[str, Callable[[bagpipe.TrainPipeline], object]] = {
    "save": lambda trained: trained.save(),
    "close": lambda trained: trained.close(),
    "evaluate": lambda trained: list(trained.evaluate(_batches())),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_before_a_signal_is_handled(call: str, tmp_path: Path) -> None:
    folder, model = str(tmp_path), Signalled()
    trained = pipeline(model, checkpoint_dir=folder)
    iterator = iter(_batches())
    for _ in range(5):
        trained.progress(iterator)
    if call == "evaluate":
        model.send = lambda: _kill(signal.SIGINT)
    else:
        trained.track("it", Tracked())
    with _handled(signal.SIGINT), pytest.raises(_Stop):
        CALLS[call](trained)
    if call != "close":
        trained.progress(iterator)
        trained.close()
    with pipeline(Signalled(), checkpoint_dir=folder) as resumed:
        assert resumed.step == (5 if call == "close" else 6)
        list(resumed.train(_batches()))
        assert_same(state_of(resumed), _expected())


class _Signalling(SocketRelay):
    """A store that sends a signal when it has a request."""

    is_armed = False

    def _handlers(self, ours: socket.socket, theirs: socket.socket) -> tuple[OnReadable, OnReadable]:
        def pass_on(source: socket.socket, target: socket.socket) -> OnReadable:
            def on_readable(selector: selectors.BaseSelector) -> None:
                chunk = source.recv(1 << 16)
                if not chunk:
                    close_pair(selector, ours, theirs)
                    return
                if source is ours and self.is_armed:
                    self.is_armed = False
                    _kill(signal.SIGINT)
                target.sendall(chunk)

            return on_readable

        return pass_on(ours, theirs), pass_on(theirs, ours)


READS: dict[str, Callable[[bagpipe.TrainPipeline, Path], object]] = {
    "rows": lambda trained, folder: trained.rows("t_f0")[[0, 1]],
    "ids": lambda trained, folder: trained.rows("t_f0").ids(),
    "chunks": lambda trained, folder: list(trained.rows("t_f0")),
    "export": lambda trained, folder: trained.export(folder / "export"),
}


@pytest.mark.redis
@pytest.mark.parametrize("read", READS)
def test_a_signal_leaves_no_half_answer_of_the_store(read: str, tmp_path: Path) -> None:
    path = tmp_path / "relay"
    with EmbeddedServer(tmp_path / "store") as server:
        with _Signalling(path, Path(server.url.removeprefix("unix://"))) as relay:
            with pipeline(store=f"unix://{path}") as trained, _handled(signal.SIGINT):
                iterator = iter(_batches())
                trained.progress(iterator)
                trained.flush()
                relay.is_armed = True
                with pytest.raises(_Stop):
                    READS[read](trained, tmp_path)
                progress_all(trained, iterator)
                assert_same(state_of(trained), _expected())


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.redis
def test_threads_that_end_leave_the_pipeline_to_others() -> None:
    with pipeline(store=None, planner="process") as trained:
        iterator = iter(_batches())
        for _ in range(2):
            _in_a_thread(lambda: trained.progress(iterator))
        progress_all(trained, iterator)
        assert_same(state_of(trained), _expected())


@pytest.mark.parametrize("name", ["step", "epoch", "position"])
def test_a_loader_can_ask_where_the_pipeline_is(name: str) -> None:
    with pipeline() as trained:

        def loader() -> Iterator[Any]:
            for batch in _batches():
                assert isinstance(getattr(trained, name), int)
                _in_a_thread(lambda: getattr(trained, name))
                yield batch

        for _ in range(2):
            assert len([*trained.train(loader())]) == STEPS
        assert (trained.step, trained.epoch) == (2 * STEPS, 2)


@pytest.mark.parametrize("call", ["flush", "close", "evaluate"])
def test_a_loader_cannot_make_a_call_that_waits_for_it(call: str) -> None:
    with pipeline() as trained:

        def loader() -> Iterator[Any]:
            yield _batches()[0]
            list(trained.evaluate([])) if call == "evaluate" else getattr(trained, call)()

        with pytest.raises(JobError, match="a call of the pipeline waits for this loader or function"):
            [*trained.train(loader())]
        assert len([*trained.train(_batches())]) == STEPS


@pytest.mark.redis
def test_a_forked_process_is_refused_and_leaves_the_pipeline_alone() -> None:
    with pipeline(store=None, planner="process") as trained:
        iterator = iter(_batches())
        trained.progress(iterator)
        child = os.fork()
        if not child:
            with suppress(BaseException):
                with pytest.raises(JobError, match=r"belongs to process \d+, from which this one was forked"):
                    trained.progress(iterator)
                trained.close()
                del trained
                gc.collect()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        progress_all(trained, iterator)
        assert_same(state_of(trained), _expected())


def _stored(store: str, namespace: str = "bagpipe") -> dict[str, torch.Tensor]:
    with pipeline(store=store, namespace=namespace, existing="rows-only") as reader:
        return {f"t_{name}": reader.rows(f"t_{name}")[torch.arange(ROWS)] for name in FEATURES}


def _rows_after(steps: int) -> dict[str, torch.Tensor]:
    with pipeline() as trained:
        progress_all(trained, iter(_batches()[:steps]))
        return {name: value for name, value in state_of(trained).items() if name.startswith("t_")}


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_a_pipeline_without_references_writes_its_rows(is_cyclic: bool) -> None:
    store = f"memory://gone-{is_cyclic}"
    trained = pipeline(store=store)
    iterator = iter(_batches())
    for _ in range(3):
        trained.progress(iterator)
    if is_cyclic:
        trained.itself = trained  # type: ignore[attr-defined]
    del trained
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bagpipe-")]
    assert_same(_stored(store), _rows_after(3))


@pytest.mark.redis
def test_rows_that_cannot_be_written_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedServer(tmp_path) as server:
        trained = pipeline(store=server.url, timeout_s=0.2)
        trained.progress(iter(batch := batches(1)))
    num_rows = sum(len(set(ids.values().tolist())) for ids in batch[0]["ids"].to_dict().values())
    del trained
    gc.collect()
    said = capfd.readouterr().err
    assert f"without pipeline.close(), and {num_rows} updated rows could not be written to the store: " in said
    assert said.count("\n") == 1


#: Leaves two pipelines open: one whose model fails in the loop's body, one that a thread trains without end.
_PROGRAM = """
import itertools, sys, threading
from tests.train_pipeline.small import batches, pipeline
from tests.train_pipeline.test_lifetime import _batches

store, how = sys.argv[1:]
mine = pipeline(store=store, namespace="mine", cache_rows=180)
others = pipeline(store=store, namespace="others", cache_rows=180, checkpoint_dir="")
has_begun = threading.Event()

def train():
    for _ in others.train(itertools.cycle(_batches()[:1])):
        has_begun.set()

threading.Thread(target=train, daemon=True).start()
for number, _ in enumerate(mine.train(_batches())):
    if number == 2:
        has_begun.wait(60)
        if how == "raise":
            raise ValueError("in the loop")
        sys.exit(3)
"""


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize(("how", "code"), [("exit", 3), pytest.param("raise", 1, marks=pytest.mark.slow)])
def test_a_program_that_ends_without_close_writes_its_rows(tmp_path: Path, how: str, code: int) -> None:
    with EmbeddedServer(tmp_path) as server:
        command = [sys.executable, "-c", _PROGRAM, server.url, how]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        assert (done.returncode, "error: " in done.stderr.replace("ValueError: ", "")) == (code, False), done.stderr
        assert_same(_stored(server.url, "mine"), _rows_after(3))
        with pipeline(store=server.url, namespace="others", existing="rows-only") as reader:
            assert sum(len(reader.rows(f"t_{name}")) for name in FEATURES)


def _left_open(rank: int, store: str) -> list[int]:
    """Train without an end, forget the pipeline on all ranks, and count the rows."""
    trained = made(store=store)
    iterator = iter(shard(rank))
    for _ in range(3):
        trained.progress(iterator)
    del trained, iterator
    gc.collect()
    with made(store=store, existing="rows-only") as reader:
        return [len(reader.rows(f"t_{name}")) for name in FEATURES]


@pytest.mark.redis
@pytest.mark.multiproc
def test_all_ranks_write_the_rows_of_a_pipeline_without_references(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        ends = on_ranks(2, _left_open, server.url)
    ids = [part["ids"].to_dict() for rank in range(2) for part in shard(rank)[:3]]
    counts = [len({id for part in ids for id in part[name].values().tolist()}) for name in FEATURES]
    assert [(end.error, end.value) for end in ends] == [(None, counts)] * 2
