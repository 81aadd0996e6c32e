"""Fixtures shared by all tests: private store servers, namespaces, and a leak check."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.util.lasting_thread import in_lasting_thread
from tests.store.nodes import ClusterNodes, start_cluster

# The suite is deterministic: its examples come from each test's own seed. `make test-full` has twice as many of each
# property; `make search` draws new ones.
settings.register_profile("suite", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("full", max_examples=100, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("suite")

# Tests run beside each other: torch's threads would wait for each other's cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's key-value store asks the name server about its clients, and answers no other client before the name server's
# deadline, 5 s for a lost packet. Its clients here wait for 2 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Rarer garbage collections save 5 % of the time.
gc.set_threshold(20_000, 20, 10)

# Shells start background jobs with SIGINT ignored, and processes inherit that. Tests need SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: How the mark expressions of `make suite` begin -> marks that a file must contain, and marks that its `pytestmark`
#: lacks.
_PARTS = {
    "alone": (("alone",), ()),
    "(redis or multiproc)": (("redis", "multiproc"), ("alone",)),
    "not (alone or redis or multiproc": ((), ("alone", "redis", "multiproc")),
}
_PYTESTMARK = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let a part of the suite import only files with its own tests: importing all files takes half a minute."""
    part = next((marks for begin, marks in _PARTS.items() if config.option.markexpr.startswith(begin)), None)
    if part is None or not collection_path.is_file() or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    of_all = "".join(_PYTESTMARK.findall(text))
    needed, excluded = part
    is_needed = not needed or any(f"mark.{name}" in text for name in needed)
    return not is_needed or any(f"mark.{name}" in of_all for name in excluded) or None


def pytest_unconfigure() -> None:
    """A thread that outlives the tests keeps the process alive: after a minute it prints all stacks and exits."""
    faulthandler.dump_traceback_later(60, exit=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files whose tests start processes first: they take longest, and no worker should end up alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("multiproc") is None)


def pytest_collection_finish() -> None:
    """Take all modules out of garbage collections, which would otherwise visit a million objects of them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Undo what would make later tests slower, or the process larger."""
    forget_generated_code()
    if nextitem is None or nextitem.path != item.path:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)  # glibc keeps gigabytes of freed arrays
        trim(0)


def forget_generated_code() -> None:
    """Remove functions that torch.fx registered for code it generated: each later trace would patch them all."""
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    if tracing is not None:
        registered: dict[tuple[int, str], dict[str, object]] = tracing._wrapped_fns_to_patch
        for key, names in list(registered.items()):
            module = sys.modules.get(str(names.get("__name__")))
            if module is None or vars(module) is not names:
                del registered[key]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A private server shared by the session. Tests use their own namespace and never flush it."""
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_servers(redis_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """URLs of three private servers, shared by the session."""
    with (
        EmbeddedServer(tmp_path_factory.mktemp("store-2")) as second,
        EmbeddedServer(tmp_path_factory.mktemp("store-3")) as third,
    ):
        yield redis_server.url, second.url, third.url


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNodes]:
    """A private cluster of three masters, shared by the session. Tests leave its slots unchanged."""
    with start_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Assert that the test leaves no thread running and no file descriptor open."""

    def descriptors() -> dict[str, str]:
        found = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                found[entry.name] = os.readlink(entry)
            except FileNotFoundError:  # the descriptor of this listing itself
                continue
        return found

    in_lasting_thread(lambda: None)  # it is there before and after
    threads_before, descriptors_before = set(threading.enumerate()), descriptors()
    yield
    threads = [thread for thread in threading.enumerate() if thread not in threads_before]
    assert not threads, f"threads left running: {threads}"
    leaked = {number: name for number, name in descriptors().items() if descriptors_before.get(number) != name}
    assert not leaked, f"file descriptors left open: {leaked}"
