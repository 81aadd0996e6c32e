"""`measure_cacher`: ids a second that a cacher reads, plans and serves to the ranks of a job, in its processor time.

cacher process, an Arrow file ──gRPC, shared memory──> one RemoteBatches per rank, in threads of this process
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import CacheConfig, CacherConfig, Config, DataConfig, OracleConfig
from bagpipe.errors import JobError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.schema import DataSchema
from bagpipe.util.processor_time import TICK_S, process_s
from bagpipe.util.programs import module_command, module_environment, module_of
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["measure_cacher", "oracle_spec"]

_EXAMPLES = 1024
_LOOKAHEAD = 32
_CACHE_ROWS = 60_000
_ROWS = 60_000
#: Batches before the measured ones, and those: processor times come in hundredths of a second.
_WARM_UP, _BATCHES = 64, 192
#: Passes over the data.
_EPOCHS = 6
_CREDITS = 6
_TIMEOUT_S = 120.0


def measure_cacher(ranks: int = 1) -> float:
    """Ids of the whole batch per second of the cacher's processor time. Takes about five seconds.

    Args:
        ranks: that take its plans. Each one costs the cacher messages of its own.

    Raises:
        JobError: the cacher ended.
    """
    # The library imports no program; the cacher is started by its own class, wherever it is installed.
    embedded: Any = import_module(f"{module_of('cacher')}.embedded").EmbeddedCacher
    with ExitStack() as stack:
        data = Path(stack.enter_context(temporary_folder("calibration")), "log.arrow")
        synth = [*module_command(module_of("data")), "synth", "--rows", str(_ROWS), "--out", str(data)]
        subprocess.run(synth, check=True, capture_output=True, env=module_environment(), timeout=_TIMEOUT_S)
        config = Config(
            data=DataConfig(format="parquet", path=str(data), batch_size=_EXAMPLES, epochs=_EPOCHS, eval_fraction=0),
            oracle=OracleConfig(lookahead=_LOOKAHEAD),
            cache=CacheConfig(rows=_CACHE_ROWS // ranks),
            cacher=CacherConfig(),
        )
        cacher = stack.enter_context(embedded(config))
        threads = stack.enter_context(ThreadPoolExecutor(ranks, thread_name_prefix="calibration"))
        clients = [threads.submit(_consume, config, cacher.url, rank, ranks, cacher.pid) for rank in range(ranks)]
        found, *_ = [client.result(_TIMEOUT_S) for client in clients]  # waits for all of them
        return found


def _consume(config: Config, url: str, rank: int, ranks: int, process: int) -> float:
    """Take all batches of a rank; ids per second of a process's time, of all ranks."""
    ids, start_s = 0, 0.0
    with RemoteBatches(url, config, credits=_CREDITS, rank=rank, world_size=ranks, job_id="calibration") as source:
        for number, step in enumerate(source.batches("train", oracle_spec(config, source.schema, ranks))):
            if number == _WARM_UP:
                start_s = process_s(process)
            elif number > _WARM_UP:
                ids += step.batch.values.size
            if number == _WARM_UP + _BATCHES:
                return ranks * ids / max(process_s(process) - start_s, TICK_S)
    raise JobError(f"expected more than {_WARM_UP + _BATCHES} batches of the cacher, got fewer")


def oracle_spec(config: Config, schema: DataSchema, ranks: int) -> OracleSpec:
    """Specification of the plans of a job on data with one table for each feature."""
    return OracleSpec(
        table_rows=tuple(schema.table(feature.table).rows for feature in schema.features),
        features=tuple(FeatureRef(feature=number, table=number) for number in range(len(schema.features))),
        num_slots=int(config.cache.rows),
        lookahead=config.oracle.lookahead,
        policy=config.oracle.policy,
        world_size=ranks,
        assign=config.cacher.assign,
    )
