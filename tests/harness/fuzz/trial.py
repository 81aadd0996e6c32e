"""`run_trial`: all twins of a draw, and whether they agree.

write the log ─> (before ─>) direct ─> fewest cache rows ─> cached ─> resumed ─> compare each with direct ─> Verdict
                                                            └─ its last checkpoint == plain_loop's numbers
"""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagpipe.errors import EXIT_DONE
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from tests.harness.fuzz.draw import DIRECT, Draw, Places, Twin, settings_of
from tests.harness.fuzz.log_files import NAMED_COLUMNS, write_log
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.twin import Outcome, TwinRun

__all__ = [
    "COMPARED",
    "PLAIN_KEYS",
    "PLAIN_MODELS",
    "Verdict",
    "difference_from_plain_loop",
    "has_plain_loop",
    "run_trial",
]

#: Fields of the result that must be equal.
COMPARED = (
    "dense_digest",
    "embedding_digest",
    "loss",
    "steps",
    "samples",
    "auc",
    "ne",
    "skipped_rows",
    "skipped_batches",
    "loss_scale",
    "stopped",
)
#: Of the twins that evaluate at the same steps.
EVALUATED = ("evaluations", "best_step", "early_stopped")
#: Keys of the admission of rows. The rows of another job are admitted, so a job that starts from them needs more.
_ADMISSION = ("data.min_uses", "data.min_uses_by_table", "data.default_row", "data.use_counts", "data.sketch_cells")
#: Cache rows of a job whose need is unknown, because it is refused without a cache.
_MANY_ROWS = 20_000
_PROGRAM_TIMEOUT_S = 120.0
#: Values of ``model.name`` and ``model.factory`` that the plain loop can train.
PLAIN_MODELS = frozenset(
    {
        "dlrm", "dcnv2", "deepfm", "wide-deep", "dcnv2-fuxictr", "deepfm-fuxictr", "finalmlp",
        "tests.system.factory:build",
    }
)  # fmt: skip
#: Its values of the keys of some models, where drawn.
PLAIN_KEYS = {
    "model.dropout": "0", "model.batch_norm": "false", "model.cross_layers": "3", "model.structure": "parallel",
    "model.heads": "1", "model.gate_mlp": "", "pipeline.backward_shares": "", "optim.precondition": "none",
    "data.min_uses": "1", "data.expire_after": "0", "eval.patience": "0",
}  # fmt: skip
#: Absolute, of every weight and optimizer state.
_TOLERANCE = 1e-12
#: Steps of Adagrad and Adam whose size is the sign of a rounding error, or large steps, magnify differences.
_LEAST_EPS, _LARGEST_RATE = 1e-6, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a trial.

    Attributes:
        seed, number: of the draw.
        draw: in words.
        end: how the direct twin ended, in words.
        has_trained: it ended well.
        num_starts, num_kills: of all twins.
        num_comparisons: twins, and plain loops, compared with the direct twin.
        seconds: wall time.
        problem: empty if none.
        commands: of all starts, if there is a problem.
        folder: with all files.
        simpler: verdict of a simpler wrong draw, if one was looked for and found.
    """

    seed: int
    number: int
    draw: str
    end: str
    num_starts: int
    num_kills: int
    num_comparisons: int
    seconds: float
    problem: str = ""
    commands: tuple[str, ...] = ()
    folder: str = ""
    has_trained: bool = False
    simpler: Verdict | None = None


def run_trial(draw: Draw, site: Site) -> Verdict:
    """Run and compare. The caller removes the folder."""
    start_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{draw.seed}-{draw.number}-"))
    data = write_log(draw.log, folder)
    outcomes: list[Outcome] = []
    problem, num_comparisons = "", 0
    need: Mapping[str, int] = {"largest": _MANY_ROWS, "total": _MANY_ROWS}
    start_from = ""
    for twin in (*filter(None, [draw.before]), *draw.twins):
        (folder / twin.name).mkdir()
        run = TwinRun(
            draw=draw,
            twin=twin,
            site=site,
            folder=folder / twin.name,
            data=data,
            cache_rows=_rows(draw, twin, need),
            start_from=start_from,
        )
        outcome = run.go()
        outcomes.append(outcome)
        is_first = twin in (draw.before, draw.twins[0])
        problem = outcome.problem or ("" if is_first else _difference(draw, twin, _direct(draw, outcomes), outcome))
        if problem:
            problem = f"{twin.name}: {problem}"
            break
        if twin is draw.before:
            if outcome.result is None:
                break  # refused
            start_from = str(folder / twin.name / "checkpoints")
            continue
        num_comparisons += not is_first
        if outcome.result is None:
            continue
        if is_first:
            need = _need(draw, site, data, folder)
        elif twin.has_checkpoints and twin.kills and _is_finite(outcome.result) and has_plain_loop(draw):
            num_comparisons += 1
            problem = difference_from_plain_loop(draw, site, data, folder / twin.name)
    return Verdict(
        seed=draw.seed,
        number=draw.number,
        draw=str(draw),
        end=_words(_direct(draw, outcomes)),
        num_starts=sum(len(outcome.commands) for outcome in outcomes),
        num_kills=sum(outcome.num_kills for outcome in outcomes),
        num_comparisons=num_comparisons,
        seconds=round(time.monotonic() - start_s, 2),
        problem=problem,
        commands=tuple(command for outcome in outcomes for command in outcome.commands) if problem else (),
        folder=str(folder),
        has_trained=_direct(draw, outcomes).result is not None,
    )


def _rows(draw: Draw, twin: Twin, need: Mapping[str, int]) -> int:
    """Cache rows of each rank."""
    if twin.share is None:
        return 0
    rows = need["largest"] + round(twin.share * (need["total"] - need["largest"]))
    return -(-rows // draw.world_size)


def _need(draw: Draw, site: Site, data: Mapping[str, str], folder: Path) -> Mapping[str, int]:
    """The most rows that must be in the cache at a time, and all rows."""
    arguments, more = _plain_arguments(draw, data), 0
    if draw.before is not None:
        arguments = [argument for argument in arguments if not argument[2:].startswith(_ADMISSION)]
        more = len(draw.log.tables)
    need = json.loads(_program(site, site.capacity_program, arguments, folder))
    return {name: number + more for name, number in need.items()}


def _direct(draw: Draw, outcomes: list[Outcome]) -> Outcome:
    """The end of the direct twin, or that of the job before if there is no other."""
    return outcomes[:2][-1] if draw.before is not None else outcomes[0]


def _difference(draw: Draw, twin: Twin, direct: Outcome, other: Outcome) -> str:
    if (other.code, other.lines) != (direct.code, direct.lines):
        return f"ended with {_words(other)}, direct with {_words(direct)}"
    if direct.result is None or other.result is None:
        return ""
    keys: tuple[str, ...] = COMPARED
    if dict(twin.settings).get("eval.every") == dict(draw.twins[0].settings).get("eval.every"):
        keys += EVALUATED
    if direct.result["early_stopped"]:  # malformed rows are counted as they are read, ahead of the end
        keys = tuple(key for key in keys if key != "skipped_rows")
    pairs = [(key, other.result[key], direct.result[key]) for key in keys]
    return "; ".join(f"{key} {found} for {expected}" for key, found, expected in pairs if found != expected)


def _words(outcome: Outcome) -> str:
    if outcome.result is not None:
        return f"{outcome.result['steps']} steps"
    return f"code {outcome.code}: {' | '.join(outcome.lines)}"


def _plain_arguments(draw: Draw, data: Mapping[str, str]) -> list[str]:
    """Flags of the job itself, without a cache or a store."""
    settings = settings_of(draw, DIRECT, Places(folder="", data=data))
    settings.pop("checkpoint.start_from", None)
    return [f"--{path}={value}" for path, value in settings.items() if value]


def has_plain_loop(draw: Draw) -> bool:
    """Whether a plain loop trains this job, and within 1e-12: float64, and steps that do not magnify rounding."""
    values = dict(draw.job)
    is_exact = values["run.dtype"] == "float64" and float(values["optim.eps"]) >= _LEAST_EPS
    is_tame = max(float(values["optim.rows_lr"]), float(values["optim.dense_lr"])) <= _LARGEST_RATE
    is_plain = (values.get("model.factory") or values["model.name"]) in PLAIN_MODELS and draw.log.num_dense > 0
    is_plain = is_plain and draw.before is None and not any(path.endswith("_by_table") for path in values)
    is_plain = is_plain and "plateau" not in (values["optim.schedule"], values["optim.rows_schedule"])
    is_plain = is_plain and values["pipeline.schedule"] not in ASYNCHRONOUS_SCHEDULES
    is_plain = is_plain and all(values.get(key, value) == value for key, value in PLAIN_KEYS.items())
    has_dense = draw.log.format in ("criteo-tsv", "mlperf-npz", *NAMED_COLUMNS, "synthetic")
    return is_exact and is_tame and is_plain and has_dense and not draw.log.extreme


def _is_finite(result: Mapping[str, Any]) -> bool:
    return not result["skipped_batches"]


def difference_from_plain_loop(draw: Draw, site: Site, data: Mapping[str, str], folder: Path) -> str:
    """The problem with the last checkpoint of a twin."""
    out = folder / "export"
    export = ["export", "--checkpoint.dir", str(folder / "checkpoints"), "--out", str(out)]
    arguments = [*_plain_arguments(draw, data), "--export", str(out)]
    try:
        _program(site, "trainer.cli", export, folder)
        found = json.loads(_program(site, "tests.harness.fuzz.plain_loop", arguments, folder))
    except RuntimeError as error:
        return f"{folder.name}: {error}"
    if found["difference"] <= _TOLERANCE:
        return ""
    return f"{folder.name}: {found['worst']} differs by {found['difference']:.3g} from a plain loop"


def _program(site: Site, module: str, arguments: list[str], folder: Path) -> str:
    """Standard output of a program that must end well.

    Raises:
        RuntimeError: it fails.
    """
    streams = Path(tempfile.mkdtemp(dir=folder)) / module.rpartition(".")[2]
    started = site.zygote.start(module, arguments, streams=streams)
    started.has_ended(_PROGRAM_TIMEOUT_S)
    started.signal(signal.SIGKILL)
    if site.zygote.reap(started) != EXIT_DONE:
        raise RuntimeError(f"{shlex.join([module, *arguments])}: {' | '.join(started.error_lines()[-3:])}")
    return started.out.read_text()
