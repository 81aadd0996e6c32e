"""Jobs with partial backwards: the same bits wherever stages and rows are, fewer rows written, less sent."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from torch import Tensor

from bagpipe.config.sections import Config
from bagpipe.distributed.interface import Pending
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.local_links import LocalLinks
from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.programs import run_forked
from tests.system.rank_threads import run_ranks
from tests.system.resumed import JOB, Resumed, digests
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import digests_of, run_to_the_end


def partial(config: Config, schedule: str, shares: str, unit: str = "microbatch", **values: object) -> Config:
    """Two ranks' stages and four micro-batches."""
    own = {"pipeline__backward_shares": shares, "pipeline__backward_unit": unit, "pipeline__microbatches": 4}
    return staged(config, schedule, 2, **{**own, **values})


@pytest.fixture(scope="module")
def log(clicks: MakeConfig) -> Config:
    """Adam, for rows too: a step with a gradient of zero would show. All embeddings enter the first stage."""
    return change(clicks("mean", "dcnv2", "adam", limit=100), run__dtype="float64", optim__dense="adam")


@pytest.mark.parametrize("shares", ["1", "1,1", "0.75,1"])
def test_full_shares_change_no_bit(log: Config, shares: str) -> None:
    """Three quarters of two stages are both of them."""
    plain = change(partial(log, "1f1b", ""), cache__rows=200)
    assert run_job(change(plain, pipeline__backward_shares=shares)).digests == run_job(plain).digests


@pytest.mark.parametrize(
    ("schedule", "shares", "unit"),
    some_of(
        [
            ("1f1b", "0.5,1", "microbatch"),
            ("gpipe", "0,1", "rank"),
            ("zb-v", "0.25,1,0.5", "microbatch"),
            ("graph", "1,0", "microbatch"),
            ("interleaved", "0.25,0.5,0.75,1", "rank"),
        ],
        {1, 2},
    ),
)
def test_stages_in_processes_and_caches_give_the_same_bits(log: Config, schedule: str, shares: str, unit: str) -> None:
    config = partial(log, schedule, shares, unit)
    direct = run_job(change(config, cache__rows=0))
    cached = run_job(change(config, cache__rows=largest_batch(config) + 3, oracle__lookahead=4))
    assert cached.digests == direct.digests
    assert run_staged(config, 2).digests == direct.digests


def test_bytes_between_stages_fall_as_the_shares_do(log: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks: forwards send the same, and the first stage takes half, or a quarter, of the gradients."""
    sent = 0

    def counting(links: LocalLinks, process: int, tag: int, tensor: Tensor) -> Pending:
        nonlocal sent
        sent += tensor.nbytes
        return send(links, process, tag, tensor)

    send = LocalLinks.send
    monkeypatch.setattr(LocalLinks, "send", counting)
    found = []
    for shares in ("1", "0.5,1", "0.5,0.25,0,1"):
        sent = 0
        run_staged(partial(change(log, data__limit=96), "gpipe", shares), 2)
        found.append(sent)
    whole, half, quarter = found
    assert (whole - quarter) / (whole - half) == pytest.approx(1.5, abs=0.1)


def test_two_pipes_and_replicas_of_two_ranks(log: Config) -> None:
    config = partial(log, "chimera", "0.5,1")
    assert_equal_numbers(run_staged(config, 2), run_staged(config))
    config = partial(log, "1f1b", "0.5,1", "rank")
    direct, cached = (run_staged(change(config, cache__rows=rows), 4) for rows in (0, 200))
    assert direct.digests == cached.digests


KFAC: dict[str, object] = {"optim__precondition": "kfac", "optim__kfac_inverse_every": 2, "optim__kfac_damping": 0.1}

#: Schedules, ranks and keys of whatever else a stage can have -> whether a plain 1f1b has the same numbers.
TOGETHER: dict[str, tuple[str, int, dict[str, object], bool]] = {
    "free order": ("dynamic", 2, {}, True),
    "free order of one process": ("dynamic", 1, {}, True),
    "unlike replicas": ("1f1b", 3, {"pipeline__replicas": "2,1"}, True),
    "unlike replicas, by ranks": ("1f1b", 3, {"pipeline__replicas": "1,2", "pipeline__backward_unit": "rank"}, True),
    "shares of the state": ("1f1b", 4, {"dense__shard": "optimizer"}, True),
    "shares of parameters": ("1f1b", 4, {"dense__shard": "parameters"}, True),
    "activations on the host": ("1f1b", 2, {"pipeline__activations": "host"}, True),
    "activations on the host, split backwards": ("zb-h1", 1, {"pipeline__activations": "host"}, True),
    "K-FAC": ("1f1b", 2, KFAC, True),
    "K-FAC of the batch before": ("1f1b", 2, {**KFAC, "optim__kfac_lag": 1}, True),
    "K-FAC, shares of gradients": ("1f1b", 4, {**KFAC, "dense__shard": "gradients"}, True),
    "K-FAC, split backwards": ("zb-h1", 1, {**KFAC, "optim__kfac_factors": "local"}, True),
    "versions": ("pipedream", 2, {}, False),
    "predictions, rows a batch late": ("spectrain", 2, {"pipeline__rows_delay": 1}, False),
    "predictions": ("pipeoptim", 1, {}, False),
}


@pytest.mark.parametrize("name", some_of([*TOGETHER], set(range(15))))
def test_whatever_else_a_stage_has(log: Config, name: str) -> None:
    schedule, world_size, keys, is_synchronous = TOGETHER[name]
    config = partial(log, schedule, "0.25,1,0.5", **keys)
    direct, cached = (run_staged(change(config, cache__rows=rows), world_size) for rows in (0, 200))
    assert cached.digests == direct.digests
    assert run_staged(change(config, pipeline__backward_shares=""), world_size).digests != direct.digests
    if is_synchronous:
        unit = config.pipeline.backward_unit
        replicas = 2 if "shares of" in name else 1
        kfac = {key: value for key, value in keys.items() if key.startswith("optim")}
        plain = partial(log, "1f1b", "0.25,1,0.5", unit, **kfac)
        assert_equal_numbers(direct, run_staged(plain, 2 * replicas))


def test_recomputed_micro_batches_keep_the_bits(log: Config) -> None:
    config = partial(log, "gpipe", "0.5,1")
    assert run_job(change(config, pipeline__recompute=True)).digests == run_job(config).digests


# ---- a pipeline on every rank ----------------------------------------------------------------------------------------


def test_ranks_take_shares_in_turn(log: Config) -> None:
    """Half of the gradients of rows are not sent, and rows that are not reached are not written."""
    config = partial(log, "1f1b", "0.5,1", "rank", pipeline__processes="1")
    whole = run_ranks(change(config, pipeline__backward_shares="", pipeline__backward_unit="microbatch"), 2)
    direct, cached = (run_ranks(change(config, cache__rows=rows), 2) for rows in (0, 100))
    assert cached.digests == direct.digests != whole.digests
    rows, all_rows = (sum(len(ids) for ids, _ in end.rows.values()) for end in (direct, whole))
    assert 0 < rows < all_rows
    assert run_ranks(config, 2).rows_sent < whole.rows_sent


def test_micro_batches_of_ranks_are_units_of_one_job(log: Config) -> None:
    ranks = partial(log, "1f1b", "0.5,1", pipeline__processes="1")
    assert_equal_numbers(run_staged(ranks, 2), run_staged(change(ranks, pipeline__microbatches=8)))


@pytest.mark.redis
@pytest.mark.multiproc
def test_processes_give_the_bits_of_threads(log: Config, redis_server: EmbeddedServer) -> None:
    config = partial(log, "1f1b", "0.5,1", "rank", pipeline__processes="1", cache__rows=100)
    placed = change(config, store__url=redis_server.url, store__namespace=uuid.uuid4().hex)
    assert digests_of(run_to_the_end(placed, 2)) == run_ranks(config, 2).digests


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_stopped_job_goes_on(server: EmbeddedServer, tmp_path: Path) -> None:
    """Rows leave the small cache all the time, many of them as they came."""
    flags = ["--pipeline.schedule", "1f1b", "--pipeline.stages", "2", "--pipeline.microbatches", "2"]
    flags += ["--model.name", "dcnv2", "--optim.rows", "adam"]
    shares = ["--pipeline.backward_shares", "0.5,1"]
    written = []
    for name, more in (("plain", []), ("partial", shares)):
        done = run_forked([*JOB, *flags, *more, "--result", str(tmp_path / f"{name}.json")], tmp_path)
        assert (done.code, done.err) == (0, "")
        written.append(json.loads((tmp_path / f"{name}.json").read_text())["rows_written"])
    assert written[1] < written[0]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *flags, *shares])
    first = job.run("--run.steps", "7")
    assert (first.code, first.err) == (0, "")
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "partial.json")
    assert job.resumed_from() == 7
