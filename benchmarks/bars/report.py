"""Tables of the benchmark: both systems side by side, and what one change alone does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.bars.settings import MODELS, Outcome, Run
from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.report import table, verdict

__all__ = ["TARGET", "tables"]

#: Largest difference of mean AUC.
TARGET = 0.002

_TITLES = {
    "adagrad": "Adagrad, which leaves unused rows as they are in both systems; the same initial values and batches",
    "adam": "Adam, which moves all rows in FuxiCTR and those of the batch in ours; the same initial values and batches",
    "own-starts": "Adam, each system with initial values, batches and dropout of its own",
}
_SIDES = (
    "parameters: FuxiCTR, ours",
    "runs",
    "FuxiCTR: AUC",
    "ours: AUC",
    "log loss: FuxiCTR, ours",
    "best epoch: FuxiCTR, ours",
)
_CHANGES = (
    "it, all rows, against ours with updates of all rows, largest of a seed",
    "it, rows of the batch, against ours, largest of a seed",
)
_DIFFERENCE = "ours - FuxiCTR, and its standard error"

_Outcomes = Mapping[str, Mapping[int, Outcome]]


def tables(values: Values) -> str:
    """A section for each part."""
    sections = []
    for part, title in _TITLES.items():
        found = _by_model(values, part)
        if found:
            sections.append(f"### {title}\n\n" + (_own_starts(found) if part == "own-starts" else _paired(found)))
    return "\n".join(sections)


def _by_model(values: Values, part: str) -> Mapping[str, _Outcomes]:
    """Outcomes by model, system and seed."""
    found: dict[str, dict[str, dict[int, Outcome]]] = {}
    for record in found_of(values, part) or []:
        run = Run(**record["run"])
        found.setdefault(run.model, {}).setdefault(run.system, {})[run.seed] = Outcome(**record["outcome"])
    return found


def _paired(found: Mapping[str, _Outcomes]) -> str:
    headers = ["model", *_SIDES, _DIFFERENCE, "target", "largest of a seed"]
    has_lazy = any("lazy" in systems for systems in found.values())
    if has_lazy:
        headers += ["SparseAdam in FuxiCTR: AUC", *_CHANGES]
    rows = []
    for model in MODELS:
        theirs, ours = found.get(model, {}).get("fuxictr", {}), found.get(model, {}).get("ours", {})
        seeds = sorted(theirs.keys() & ours.keys())
        if not seeds:
            continue
        differences = [ours[seed].auc - theirs[seed].auc for seed in seeds]
        mean = statistics.mean(differences)
        row = [
            model,
            *_sides([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds]),
            f"{mean:+.1e}" + (f" ± {_standard_error(differences):.0e}" if len(differences) > 1 else ""),
            f"at most {TARGET}: {verdict(abs(mean), at_most=TARGET)}",
            f"{max(map(abs, differences)):.1e}",
        ]
        if has_lazy:
            sparse, lazy, all_rows = (found[model].get(name, {}) for name in ("sparse-adam", "lazy", "all-rows"))
            row += [_spread(list(sparse.values())) if sparse else "", _largest(all_rows, sparse), _largest(ours, lazy)]
        rows.append(row)
    return table(headers, rows)


def _largest(one: Mapping[int, Outcome], other: Mapping[int, Outcome]) -> str:
    """Largest difference of AUC over the common seeds."""
    seeds = one.keys() & other.keys()
    return f"{max(abs(one[seed].auc - other[seed].auc) for seed in seeds):.1e}" if seeds else ""


def _own_starts(found: Mapping[str, _Outcomes]) -> str:
    rows = []
    for model in MODELS:
        theirs, ours = (list(found.get(model, {}).get(system, {}).values()) for system in ("fuxictr", "ours"))
        if min(len(theirs), len(ours)) > 1:
            difference = _mean(ours) - _mean(theirs)
            errors = (_standard_error([outcome.auc for outcome in group]) for group in (ours, theirs))
            rows.append([model, *_sides(theirs, ours), f"{difference:+.4f} ± {math.hypot(*errors):.4f}"])
    return table(["model", *_SIDES, _DIFFERENCE], rows)


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _sides(theirs: Sequence[Outcome], ours: Sequence[Outcome]) -> list[str]:
    """Cells of `_SIDES`."""
    return [
        f"{theirs[0].parameters:,}, {ours[0].parameters:,}",
        f"{len(theirs)}, {len(ours)}",
        _spread(theirs),
        _spread(ours),
        f"{_log_loss(theirs):.5f}, {_log_loss(ours):.5f}",
        f"{_best_epochs(theirs)}, {_best_epochs(ours)}",
    ]


def _mean(outcomes: Sequence[Outcome]) -> float:
    return statistics.mean(outcome.auc for outcome in outcomes)


def _log_loss(outcomes: Sequence[Outcome]) -> float:
    return statistics.mean(outcome.logloss for outcome in outcomes)


def _spread(outcomes: Sequence[Outcome]) -> str:
    if len(outcomes) < 2:
        return f"{_mean(outcomes):.5f}"
    return f"{_mean(outcomes):.5f} ± {statistics.stdev(outcome.auc for outcome in outcomes):.5f}"


def _best_epochs(outcomes: Sequence[Outcome]) -> str:
    best = [1 + outcome.history.index(max(outcome.history)) for outcome in outcomes]
    return f"{statistics.mean(best):.1f}"
