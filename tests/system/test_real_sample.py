"""The real sample, if present: cached equals direct bit for bit, and both score as the plain loop does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

from bagpipe.config.sections import CacheConfig, Config, DataConfig, ModelConfig, OptimConfig, OracleConfig, StoreConfig
from tests.data.files import real_samples
from tests.system.jobs import change, largest_batch, run_job
from tests.system.plain_jobs import plain_job, plain_scores

ROOT = Path(__file__).parents[2]


def config_of(path: Path) -> Config:
    """The shipped configuration on the sample, with batch 1024 and lookahead 32."""
    values = tomllib.loads((ROOT / "trainer/configs/criteo.toml").read_text())
    model: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values["model"].items()
    }
    return Config(
        data=DataConfig(**{**values["data"], "path": str(path), "batch_size": 1024, "eval_fraction": 0.1}),
        oracle=OracleConfig(lookahead=32),
        cache=CacheConfig(rows=0),
        store=StoreConfig(url="memory://"),
        model=ModelConfig(**model),
        optim=OptimConfig(**values["optim"]),
    )


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", real_samples(), ids=lambda path: path.name)
def test_the_real_sample(path: Path, redis_servers: tuple[str, ...], namespace: str) -> None:
    config = config_of(path)
    direct = run_job(config)
    assert direct.auc is not None
    for cache_rows, url in ((largest_batch(config), redis_servers[0]), (60_000, ",".join(redis_servers))):
        cached = run_job(
            change(config, cache__rows=cache_rows, store__url=url, store__namespace=f"{namespace}-{cache_rows}"),
            transport="process",
        )
        assert cached.digests == direct.digests
        assert cached.losses == direct.losses
        assert (cached.auc, cached.ne) == (direct.auc, direct.ne)
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        logits, labels = plain_scores(plain_job(config), config)
    assert round(direct.auc, 4) == round(roc_auc_score(labels.numpy(), logits.numpy()), 4)
    assert direct.auc > 0.6, "better than guessing"
