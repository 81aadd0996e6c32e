"""Settings: model sizes, batch size, threads; and the trainer's configuration for each.

Setting ──config(data, cache_rows, url)──> trainer Config: ours runs it, the others take model and optimizers from it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bagpipe.config.sections import (
    CacheConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    OracleConfig,
    RunConfig,
    StoreConfig,
)

__all__ = ["NAMESPACE", "SETTINGS", "Setting"]

NAMESPACE = "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model on the sample.

    Attributes:
        name: for the command line and the report.
        what: one line for the report.
        batch_size, embedding_dim, bottom_mlp, top_mlp: as in the configuration.
        threads: compute threads of every process that trains.
        cache_share: rows a cache holds (ours and the LRU), as a share of all rows of the sample.
        lookahead: batches the oracle sees.
        dense_lr: learning rate of the dense part. If it is too high, training first diverges, and its result depends on
            rounding.
    """

    name: str
    what: str
    embedding_dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    batch_size: int = 1024
    threads: int = 1
    cache_share: float = 0.2
    lookahead: int = 32
    dense_lr: float = 0.02

    def config(
        self,
        data: DataConfig,
        *,
        cache_rows: int = 0,
        url: str = "memory://",
        client: Literal["thread", "process"] = "thread",
    ) -> Config:
        """The trainer's configuration; one pass over the data, its last tenth held out."""
        return Config(
            data=DataConfig(
                path=data.path,
                format=data.format,
                limit=data.limit,
                batch_size=self.batch_size,
                epochs=1,
                eval_fraction=0.1,
            ),
            oracle=OracleConfig(lookahead=self.lookahead),
            cache=CacheConfig(rows=cache_rows),
            store=StoreConfig(url=url, namespace=NAMESPACE, client=client),
            model=ModelConfig(
                name="dlrm", embedding_dim=self.embedding_dim, bottom_mlp=self.bottom_mlp, top_mlp=self.top_mlp
            ),
            optim=OptimConfig(rows="adagrad", rows_lr=0.02, dense="adagrad", dense_lr=self.dense_lr, eps=1e-8),
            run=RunConfig(seed=0, threads=self.threads),
        )


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            name="criteo",
            what="the model of trainer/configs/criteo.toml",
            embedding_dim=16,
            bottom_mlp=(512, 256, 64),
            top_mlp=(512, 256),
        ),
        Setting(
            name="wide",
            what="the DLRM of the Bagpipe paper's scripts",
            embedding_dim=48,
            bottom_mlp=(512, 256, 64),
            top_mlp=(1024, 1024, 1024, 256, 128),
            dense_lr=0.002,
        ),
        Setting(
            name="narrow",
            what="narrow layers: little to compute beside the rows",
            embedding_dim=16,
            bottom_mlp=(64,),
            top_mlp=(64,),
        ),
        Setting(
            name="small",
            what="as narrow, 64 examples a batch: what a step costs beside its work",
            embedding_dim=16,
            bottom_mlp=(64,),
            top_mlp=(64,),
            batch_size=64,
        ),
        Setting(
            name="criteo-2-threads",
            what="as criteo, two compute threads: they share the two cores with our cacher, lanes and server",
            embedding_dim=16,
            bottom_mlp=(512, 256, 64),
            top_mlp=(512, 256),
            threads=2,
        ),
    )
}
