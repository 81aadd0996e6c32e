"""`Draw`: one job and its twins, as a frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.harness.fuzz.log import Log

__all__ = ["DIRECT", "NOWHERE", "Draw", "Given", "Kill", "Places", "Settings", "Twin", "settings_of"]

#: Values by key path, as written in flags.
Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The end of a start, at a failpoint.

    Attributes:
        point: of `bagpipe.util.failpoints`.
        times: the passage at which it ends.
        rank: the rank that ends itself.
        signal: SIGKILL, or SIGINT: a clean stop.
        spreads: the other ranks are killed too, immediately; else they must notice.
    """

    point: str
    times: int
    rank: int = 0
    signal: str = "SIGKILL"
    spreads: bool = True

    @property
    def crash_at(self) -> str:
        """Value of BAGPIPE_CRASH_AT."""
        return f"{self.point}:{self.times}:{self.signal}"

    def __str__(self) -> str:
        return f"{self.signal} of rank {self.rank} at {self.point}:{self.times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """One way to run the job.

    Attributes:
        name: in reports.
        settings: keys that must not change a result.
        share: cache rows from the fewest that fit (0) to all rows (1); None: no cache.
        store: memory, server, servers, cluster, own (a server of each start) or own-durable (with files that remain).
        cacher: daemon, or own (a process of each start).
        has_checkpoints: a checkpoint folder is given.
        kills: ends of its first starts; the same command is started until it ends by itself.
        again: it is started once more after its end.
        traces: it writes a trace.
    """

    name: str
    settings: Settings = ()
    share: float | None = None
    store: str = "server"
    cacher: str = "daemon"
    has_checkpoints: bool = False
    kills: tuple[Kill, ...] = ()
    again: bool = False
    traces: bool = False

    @property
    def grows(self) -> bool:
        """Whether its cache grows up to its rows: half of those that are neither the smallest nor the largest."""
        return self.share is not None and 0.0 < self.share < 1.0 and int(self.share * 1_000_000) % 2 == 1


#: The reference.
DIRECT = Twin(name="direct", settings=(("data.workers", "0"), ("oracle.lookahead", "1")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is not drawn of a job, which then starts anew.

    Attributes:
        job: keys that decide its results.
        twin: keys of every twin but the direct one.
        direct: keys of the direct twin.
        world_size: ranks.
    """

    job: Settings
    twin: Settings
    direct: Settings = ()
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A job and its twins. A pure function of (seed, number).

    Attributes:
        seed, number: of the draw.
        world_size: ranks.
        log: its data.
        job: keys that decide its results, except those of the log.
        twins: the direct one first.
        before: makes the checkpoint that the twins start from; None: they start anew.
    """

    seed: int
    number: int
    world_size: int
    log: Log
    job: Settings
    twins: tuple[Twin, ...]
    before: Twin | None = None

    def __str__(self) -> str:
        values = dict(self.job)
        model = values.get("model.factory", "").rpartition(":")[2] or values["model.name"]
        precision = "/".join([values["run.dtype"], values["cache.dtype"], values["run.autocast"]])
        schedule = values["pipeline.schedule"]
        stages = f" {schedule}{values['pipeline.stages']}x{values['pipeline.microbatches']}"
        more = [name for name, is_there in self._more(values).items() if is_there]
        return (
            f"{model} on {self.log.num_examples} {self.log.format} examples, {self.world_size} ranks{stages}, "
            f"{', '.join([values['optim.rows'] + '+' + values['optim.dense'], precision, *more])}"
        )

    def _more(self, values: Mapping[str, str]) -> dict[str, bool]:
        """What few draws have, in words."""
        twin = dict(self.twins[-1].settings)
        shard = twin.get("dense.shard", "none")
        return {
            "compiled": values.get("run.compile") == "true",
            "verified": values.get("run.verify", "0") != "0",
            "rows a batch late": values["pipeline.rows_delay"] != "0",
            "K-FAC": values["optim.precondition"] != "none",
            "partial backward": bool(values["pipeline.backward_shares"]),
            f"shares of {shard}": shard != "none",
            f"replicas {values['pipeline.replicas']}": bool(values["pipeline.replicas"]),
            "admission": values["data.min_uses"] != "1" or "data.min_uses_by_table" in values,
            "expiry": values["data.expire_after"] != "0" or "data.expire_after_by_table" in values,
            "plateau": "plateau" in (values["optim.schedule"], values["optim.rows_schedule"]),
            "patience": values["eval.patience"] != "0",
            "stream": "data.follow" in values,
            "started from another job": self.before is not None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a twin's settings depend on beside the draw.

    Attributes:
        folder: of the twin's files.
        data: values of the log's keys, from `tests.harness.fuzz.log_files.write_log`.
        store_urls: by kind of store.
        namespace: in the store.
        cacher_url: of the daemon.
        cache_rows: of the twin.
        start_from: the checkpoints of the job before.
    """

    folder: str
    data: Mapping[str, str] = field(default_factory=dict)
    store_urls: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "bagpipe"
    cacher_url: str = ""
    cache_rows: int = 0
    start_from: str = ""


#: Places that do not exist, to check a configuration.
NOWHERE = Places(folder="/nowhere", data={"data.path": "/nowhere/log"}, start_from="/nowhere/before")


def settings_of(draw: Draw, twin: Twin, places: Places) -> dict[str, str]:
    """All values by key path that differ from the defaults, as written in flags."""
    settings = {**dict(draw.job), **dict(twin.settings), **places.data, "data.format": draw.log.format}
    if not twin.has_checkpoints:
        unused = ("checkpoint.", "eval.keep_best")
        settings = {path: value for path, value in settings.items() if not path.startswith(unused)}
    else:
        settings["checkpoint.dir"] = f"{places.folder}/checkpoints"
    if twin is draw.before:
        settings.pop("checkpoint.start_without", None)
    elif draw.before is not None:
        settings["checkpoint.start_from"] = places.start_from
    settings["cache.rows"] = "auto" if twin.grows else str(places.cache_rows)
    settings["cache.max_rows"] = str(places.cache_rows) if twin.grows else "0"
    settings["store.url"] = places.store_urls.get(twin.store, "")
    settings["store.namespace"] = places.namespace
    settings["cacher.url"] = places.cacher_url if twin.cacher == "daemon" else ""
    if twin.store == "own-durable":
        settings["run.dir"] = f"{places.folder}/own"
    if twin.traces:
        settings["run.trace"] = f"{places.folder}/trace.json"
    # Ranks wait for the one that compiles longest.
    settings["run.peer_timeout_s"] = "60" if settings.get("run.compile", "false") == "false" else "600"
    return settings
