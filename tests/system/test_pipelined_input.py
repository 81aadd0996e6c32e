"""Invalid pipeline settings: exit code 2, one line that names the problem and its place, and an untouched store."""

from __future__ import annotations

import re
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_lines
from tests.distributed.processes import run_ranks
from tests.system.jobs import change
from tests.system.programs import await_gone, run_forked
from tests.system.staging import staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import whole_job
from tests.system.writes import client_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.batch_size", "16", "--model.embedding_dim", "4", "--model.bottom_mlp", "4", "--model.top_mlp", "4",
    "--data.format", "criteo-tsv", "--data.workers", "0", "--cache.rows", "5000",
    "--pipeline.schedule", "1f1b", "--pipeline.stages", "2", "--pipeline.microbatches", "4",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Keys of the section with their values, added to those of a valid job, and the expected message."""

    name: str
    pattern: str
    factory: str = ""
    values: tuple[tuple[str, object], ...]

    @property
    def arguments(self) -> list[str]:
        flags = [word for key, value in self.values for word in (f"--pipeline.{key}", str(value))]
        if self.factory:
            flags += ["--model.factory", f"tests.system.staged_models:{self.factory}"]
        return flags


def case(name: str, pattern: str, *, factory: str = "", **values: object) -> Case:
    return Case(name=name, pattern=pattern, factory=factory, values=tuple(values.items()))


NOT_ALLOWED = r"--pipeline\.schedule {0} does not allow these pipeline\.stages, microbatches and chunks: {0}: "

CASES = [
    case(
        "unknown schedule", r"--pipeline\.schedule must be one of none, 1f1b, .*, zb-v.*, got 'gpie'", schedule="gpie"
    ),
    case("stages without a schedule", r"--pipeline\.stages 2 needs pipeline\.schedule, .* got none", schedule="none"),
    case(
        "odd micro-batches in two directions",
        NOT_ALLOWED.format("chimera") + r"micro-batches must be a multiple of 2, got 7",
        schedule="chimera",
        microbatches=7,
    ),
    case(
        "fewer micro-batches than stages",
        NOT_ALLOWED.format("dualpipe-v") + r"micro-batches must be at least 4, the number of stages, got 3",
        schedule="dualpipe-v",
        stages=4,
        microbatches=3,
    ),
    case(
        "micro-batches that make no rounds",
        NOT_ALLOWED.format("interleaved") + r"micro-batches must be a multiple of 3, .* got 7",
        schedule="interleaved",
        stages=4,
        microbatches=7,
    ),
    case("no micro-batches", r"--pipeline\.microbatches must be at least 1, got 0", microbatches=0),
    case(
        "stages that fill no rank",
        NOT_ALLOWED.format("zb-v") + r"stages must be a multiple of 2 chunks, got 3",
        schedule="zb-v",
        stages=3,
    ),
    case("chunks of a chain", NOT_ALLOWED.format("1f1b") + r"chunks must be 1, got 2", chunks=2),
    case(
        "more stages than operators",
        r"pipeline\.stages must be 1 to \d, the operators of the model's dense part, got 40",
        stages=40,
    ),
    case(
        "unknown module",
        r"stage name 'intr_arch' is not in the model; it has dense_arch, inter_arch, over_arch",
        partition="dense_arch=0,intr_arch=1",
    ),
    case(
        "the embeddings as a stage",
        r"stage name 'sparse_arch' belongs to the embedding stage, which has no number: leave it out",
        partition="sparse_arch=0,dense_arch=1",
    ),
    case(
        "missing stage",
        r"pipeline\.partition must use the stages 0 to 3 \(pipeline\.stages\), got \[0, 1, 3\]",
        stages=4,
        partition="dense_arch=0,inter_arch=1,over_arch=3",
    ),
    case("module named twice", r"pipeline\.partition names dense_arch twice", partition="dense_arch=0,dense_arch=1"),
    case(
        "no stage number",
        r"--pipeline\.partition must be auto or \"module=stage,…\", got 'dense_arch'",
        partition="dense_arch",
    ),
    case(
        "stages in a circle",
        r"the stage graph has a cycle: 0 -> 1 -> 0: inter_arch\.\S+ of stage 0 feeds over_arch\.\S+ of stage 1; .*",
        schedule="graph",
        partition="dense_arch=1,inter_arch=0,over_arch=1",
    ),
    case(
        "a chain that leads back",
        r"1f1b: every edge must lead to a higher stage number, got 2-1",
        stages=3,
        partition="dense_arch=0,inter_arch=2,over_arch=1",
    ),
    case(
        "a batch norm",
        r"pipeline\.microbatches must be 1 for a model whose examples depend on each other \(between\), got 4",
        factory="normalising",
    ),
    case(
        "a mean over the batch",
        r"pipeline\.microbatches must be 1 for a model whose examples depend on each other \(.*: sub\), got 4",
        factory="mixing",
    ),
    case(
        "a model that looks at values",
        r"model Trunk cannot be cut into stages: its forward cannot be traced \(.*\); .*",
        factory="untraceable",
    ),
    case(
        "a layer of two stages",
        r"parameter 'between\.weight' is used in stages 0 \(first\+between\) and 1 \(second\+.*\); "
        r"put its users into one stage",
        factory="tied",
        partition="first=0,between=0,second=1,between.between_1=1,head=1",
    ),
    case(
        "vectors that are not pooled",
        r"layer: combines parameter 'layer\.bias' with values, which has not one row per example; pool embeddings .*",
        factory="sequences",
    ),
]


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.tsv"
    path.write_bytes(criteo_lines(64))
    return path


def keys_of(server: EmbeddedServer, namespace: str) -> list[bytes]:
    with closing(client_of(server.url)) as client:
        return list(client.keys(f"*{namespace}*"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_stages(case: Case, good_file: Path, redis_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    store = ["--store.url", redis_server.url, "--store.namespace", namespace]
    # The case's own flags stand last and take precedence.
    done = run_forked([*SMALL, "--data.path", str(good_file), *store, *case.arguments], tmp_path)
    assert done.code == 2, done.err
    assert re.fullmatch(f"error: {case.pattern}", done.error_line), done.err
    assert keys_of(redis_server, namespace) == []
    await_gone(done.mark)


def test_the_base_job_is_valid(good_file: Path, redis_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    store = ["--store.url", redis_server.url, "--store.namespace", namespace]
    done = run_forked([*SMALL, "--data.path", str(good_file), *store], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert keys_of(redis_server, namespace)


RANKS = [
    (
        3,
        {},
        r"pipeline\.stages: 1f1b with 2 stages runs on 2 pipeline ranks, so the job must have 1 rank or a multiple of "
        r"2, got 3 \(any, with pipeline\.processes 1\)",
    ),
    (
        2,
        {"cacher__assign": "locality"},
        r"cacher\.assign must be contiguous where ranks read unequal shares of a batch \(1, 0\), got 'locality'",
    ),
]


@pytest.mark.parametrize(("world_size", "values", "pattern"), RANKS, ids=["ranks", "locality"])
def test_ranks_that_do_not_fit(
    world_size: int,
    values: dict[str, object],
    pattern: str,
    clicks: MakeConfig,
    redis_server: EmbeddedServer,
) -> None:
    namespace = uuid.uuid4().hex
    config: Config = change(clicks(), store__url=redis_server.url, store__namespace=namespace, cache__rows=200)
    ends = run_ranks(world_size, whole_job, change(staged(config, "1f1b", 2), **values))
    for end in ends:
        assert end.error is not None
        kind, line = end.error
        assert kind == "InputError"
        assert re.fullmatch(rf"(rank \d: )?{pattern}", line), line
    assert keys_of(redis_server, namespace) == []
