"""The version table of a program as text: per stage and batch, the weights of its forwards and backwards.

    stage 0 keeps 1 version and 1 prediction
        batch  forward  backward  makes  behind
            0        0         0      1     0 0
            1      0+1         1      2     1 0         0+1: version 0, predicted 1 step ahead

*Behind* is the staleness of the batch's oldest forward and backward. Micro-batches with other weights than those before
them are listed after a comma.
"""

from __future__ import annotations

from bagpipe.schedule.analysis.versions import KeptWeights, VersionUse, kept_weights, version_table
from bagpipe.schedule.ir.program import Program

__all__ = ["version_text"]

_HEADINGS = ("batch", "forward", "backward", "makes", "behind")
_FOOT = "behind: updates between the version used and that of the batch, by forward and backward"
_PREDICTED_FOOT = "2+1: version 2, predicted 1 step ahead"


def version_text(program: Program) -> str:
    """The table; what a stage keeps is the most over the batches of the program.

    Raises:
        ScheduleError: the program's versions are not valid.
    """
    by_batch: dict[int, dict[int, list[VersionUse]]] = {}
    for use in version_table(program):
        by_batch.setdefault(use.stage, {}).setdefault(use.batch, []).append(use)
    lines: list[str] = []
    for stage, kept in kept_weights(program).items():
        lines.append(f"stage {stage} keeps {_kept_words(kept)}")
        lines += _aligned([_HEADINGS, *(_row(batch, uses) for batch, uses in sorted(by_batch[stage].items()))])
    lines.append(_FOOT)
    if any(use.prediction for uses in by_batch.values() for own in uses.values() for use in own):
        lines.append(_PREDICTED_FOOT)
    return "\n".join(lines) + "\n"


def _row(batch: int, uses: list[VersionUse]) -> tuple[str, ...]:
    by_pass = [[use for use in uses if use.of == of] for of in ("forward", "backward")]
    texts = [",".join(dict.fromkeys(use.weights.text for use in own)) or "-" for own in by_pass]
    behind = [str(max(use.staleness for use in own)) if own else "-" for own in by_pass]
    makes = next((str(use.makes) for use in uses if use.makes is not None), "-")
    return (str(batch), *texts, makes, " ".join(behind))


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _kept_words(kept: KeptWeights) -> str:
    versions = f"{kept.versions} version{'s' if kept.versions > 1 else ''}"
    if not kept.predictions:
        return versions
    return f"{versions} and {kept.predictions} prediction{'s' if kept.predictions > 1 else ''}"
