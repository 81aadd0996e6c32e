"""`measure_lanes`: processor times of the training loop's operations, from small jobs on this machine.

sizes x dimensions ──JobSettings──> processes of `measured_job`, one per rank ──JobTimes──> lines ──> LaneTimes
                                                                             ──> share of the interpreter lock
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagpipe.calibration.job_times import JobSettings, JobTimes
from bagpipe.calibration.rows import line
from bagpipe.cluster.model import COMPUTE_OPS, LaneTimes
from bagpipe.errors import JobError
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.util.documents import parse_json
from bagpipe.util.programs import module_command, module_environment
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["MeasuredLanes", "cores_used", "lock_share", "measure_lanes"]

_MODULE = "bagpipe.calibration.measured_job"
_TIMEOUT_S = 300.0
#: Examples of a rank's batch, few and many.
_SIZES = (256, 1024)
#: Weights of a row; Adagrad's state comes on top.
_DIMS = (16, 128)
#: Slots per example: fewer than a window needs would stop the job, many more would leave the store alone.
_SLOTS_PER_EXAMPLE = 32
#: Examples, weights of a row and dense layers of the job that shows how lanes delay each other.
_BUSY = (1024, 16, (256, 128))
#: Operations that take plans. Ranks of a trainer take them from a cacher, as one rank does from its planner process;
#: those of `bagpipe.TrainPipeline` exchange the ids of their own loaders first.
_PLANS = ("X_READ",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLanes:
    """Times and shares that the jobs showed.

    Attributes:
        lanes: of every operation, by size of a row.
        lock_share: as of `TrainerHosts`.
        cores_used: by the ranks, the planner and the server of a job with dense layers, on average.
    """

    lanes: tuple[LaneTimes, ...]
    lock_share: float
    cores_used: float


def measure_lanes(ranks: int = 1) -> MeasuredLanes:
    """Run a job for each size and dimension, and one with dense layers; takes about 20 seconds.

    Args:
        ranks: of the jobs, one processor thread each.

    Raises:
        InputError, StoreError: no store server can be started.
        JobError: a job failed.
    """
    jobs = [(examples, dim, ()) for dim in _DIMS for examples in _SIZES]
    *measured, busy = _run(1, [*jobs, _BUSY])
    found, share = _lanes(measured), lock_share(busy)
    if ranks > 1:
        *measured, busy = _run(ranks, [*jobs, _BUSY])
        found = {**_lanes(measured), **{key: times for key, times in found.items() if key[0] in _PLANS}}
    return MeasuredLanes(lanes=tuple(found.values()), lock_share=share, cores_used=cores_used(busy, ranks))


def _lanes(measured: Sequence[JobTimes]) -> dict[tuple[str, int], LaneTimes]:
    """(operation, dimension) -> its times, from a small and a large job of every dimension."""
    pairs = zip(_DIMS, measured[::2], measured[1::2], strict=True)
    found = {}
    for dim, few, many in pairs:
        for op in many.ops:
            fixed_s, item_s = _line(op, few, many)
            found[op, dim] = LaneTimes(op=op, row_bytes=8 * dim, fixed_s=fixed_s, item_s=item_s)
    return dict(sorted(found.items()))


def lock_share(times: JobTimes) -> float:
    """Part of the other lanes' processor time that the compute lane's step is longer than its own."""
    compute_s = sum(each.processor_s for op, each in times.ops.items() if op in COMPUTE_OPS)
    others_s = sum(each.processor_s for op, each in times.ops.items() if op not in COMPUTE_OPS)
    return min(1.0, max(0.0, (times.step_s - compute_s) / others_s))


def cores_used(times: JobTimes, ranks: int) -> float:
    """Processor time of all processes of a job in a second."""
    own_s = sum(each.processor_s for each in times.ops.values())
    return (ranks * own_s + times.planner_s + times.server_s) / times.step_s


def _line(op: str, few: JobTimes, many: JobTimes) -> tuple[float, float]:
    pair = few.ops[op], many.ops[op]
    return line([each.items for each in pair], [each.processor_s for each in pair])


def _run(ranks: int, jobs: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[JobTimes]:
    """The times of rank 0 in jobs of (examples, dim, layers), one after the other in one process per rank.

    Raises:
        JobError: a process failed; what it printed last.
    """
    with temporary_folder("calibration") as folder, EmbeddedServer(folder) as server:
        settings = [
            JobSettings(
                store_url=server.url,
                namespace=f"calibration-{number}",
                server_process=server.process_id,
                examples=examples,
                dim=dim,
                cache_rows=_SLOTS_PER_EXAMPLE * examples,
                layers=layers,
            )
            for number, (examples, dim, layers) in enumerate(jobs)
        ]
        source, target = Path(folder, "settings.json"), Path(folder, "times.json")
        source.write_text(json.dumps([dataclasses.asdict(each) for each in settings]), encoding="utf-8")
        words = [*_launcher(ranks), str(source), str(target)]
        done = subprocess.run(
            words, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            last = next((text for text in reversed(done.stderr.splitlines()) if text.strip()), "no message")
            raise JobError(f"a job of {ranks} ranks to measure this machine failed: {last}")
        return [JobTimes.of(each) for each in parse_json(target.read_text(encoding="utf-8"))]


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return module_command(_MODULE)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", _MODULE]


def _environment() -> dict[str, str]:
    """That of a program of ours, without the ranks of a job that this process may belong to."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {**{key: value for key, value in module_environment().items() if key not in ranks}, "OMP_NUM_THREADS": "1"}
