"""`Site`: the interpreter and the servers that all runs of a harness share. Context manager."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bagpipe.store.server.embedded import EmbeddedServer
from tests.harness.zygote import Zygote
from tests.store.nodes import start_cluster

__all__ = ["PRELOADED", "Site"]

#: Imported once for all programs.
PRELOADED = (
    "trainer.cli",
    "trainer.job",
    "trainer.export",
    "torchrec",
    "cacher.cli",
    "grpc.experimental",
    "bagpipe.store.redis.store",
    "bagpipe.store.memory.store",
    "pyarrow.parquet",
    "data.csv",
    "data.huggingface",
    "data.mlperf",
    "data.tfrecord",
    "data.parquet",
    "tests.harness.fuzz.capacity",
    "tests.harness.fuzz.plain_loop",
    "tests.system.staged_models",
)


@dataclass(slots=True)
class Site:
    """Shared by the runs of one thread.

    Args:
        folder: of the servers' sockets.
        programs: checkout whose trainer and cacher are run.
        with_cluster: a cluster of three servers is started too.
        modules: imported before the first fork.
        capacity_program: says how many cache rows a job needs.

    Attributes:
        zygote: forks all programs.
        store_urls: by kind of store.
    """

    folder: Path
    programs: Path
    with_cluster: bool = False
    modules: tuple[str, ...] = PRELOADED
    capacity_program: str = "tests.harness.fuzz.capacity"
    zygote: Zygote = field(init=False)
    store_urls: Mapping[str, str] = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with self._stack as stack:
            # A program that is aborted prints the stacks of its threads; one that compiles has no processes for it.
            environment = {"PYTHONFAULTHANDLER": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            self.zygote = stack.enter_context(Zygote(self.modules, self.programs, environment))
            first = stack.enter_context(EmbeddedServer(self.folder / "first"))
            second = stack.enter_context(EmbeddedServer(self.folder / "second"))
            urls = {"memory": "memory://", "server": first.url, "servers": f"{first.url},{second.url}"}
            if self.with_cluster:
                urls["cluster"] = stack.enter_context(start_cluster(self.folder / "cluster")).url
            self.store_urls = urls
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
