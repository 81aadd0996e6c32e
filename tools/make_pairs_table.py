"""Write the table of pairs in docs/dense.md: which ways to hold, run and step the dense part go together.

    one configuration per way ──merged by pairs──> check_config ──its message, if it refuses──> the table and its notes

``python -m tools.make_pairs_table``; a test compares the page with the code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from bagpipe.config.ranges import NumberText
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from tools.make_config_table import between

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dense.md"
BEGIN, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"

Values = Mapping[str, Any]

_STAGES: Values = {"pipeline.schedule": "1f1b", "pipeline.stages": 2, "pipeline.microbatches": 4}

#: Ways to hold and run the dense part -> keys that ask for one.
AXES: Mapping[str, Values] = {
    "stages": _STAGES,
    "asynchronous schedule": {**_STAGES, "pipeline.schedule": "pipedream-2bw"},
    "free order": {**_STAGES, "pipeline.schedule": "dynamic"},
    "unlike replicas": {**_STAGES, "pipeline.replicas": "2,1"},
    "compiled": {"run.compile": True},
    "CUDA graph": {"run.cuda_graph": True, "run.device": "cuda"},
    "verification": {**_STAGES, "run.verify": 3},
    "shares (ZeRO)": {"dense.shard": "gradients"},
    "chunks": {"dense.state": "host"},
    "K-FAC": {"optim.precondition": "kfac"},
    "partial backward": {**_STAGES, "pipeline.backward_shares": NumberText("0.5,1")},
    "host activations": {**_STAGES, "pipeline.activations": "host"},
}

#: What is done to gradients, steps and weights -> keys that ask for it.
PARTS: Mapping[str, Values] = {
    "limit of the norm": {"optim.clip_norm": 1.0, "optim.clip_scope": "all"},
    "limit of elements": {"optim.clip_value": 1.0},
    "batches left out": {"run.nonfinite": "skip"},
    "growing loss scale": {"run.nonfinite": "skip", "run.loss_scale_growth_interval": 100, "run.autocast": "float16"},
    "averages of weights": {"optim.ema_decay": 0.9},
    "decay of rows": {"optim.rows_weight_decay": 0.1},
    "LAMB": {"optim.dense": "lamb"},
}

#: Further ways, for what holds of three at a time only.
FURTHER: Mapping[str, Values] = {
    "rows read a batch late": {**AXES["asynchronous schedule"], "pipeline.rows_delay": 1},
    "predicted weights": {**_STAGES, "pipeline.schedule": "spectrain"},
    "K-FAC with a lag": {**_STAGES, "optim.precondition": "kfac", "optim.kfac_lag": 1},
}

#: Values of one key exclude each other. Of two schedules, one that names a kind wins over plain stages.
_PLAIN = "1f1b"


def merged(one: Values, two: Values) -> Values | None:
    """The keys of both; None: they give a key different values."""
    found = dict(one)
    for key, value in two.items():
        if found.get(key, value) != value and _PLAIN not in (found[key], value):
            return None
        if value != _PLAIN or key not in found:
            found[key] = value
    return found


def problem(*ways: Values) -> str:
    """Why some ways do not go together, as a job says it; empty: they do."""
    values: Values = {}
    for way in ways:
        both = merged(values, way)
        if both is None:
            return "a schedule has one order"
        values = both
    config = dataclasses.replace(Config(), data=dataclasses.replace(Config().data, format="synthetic"))
    for path, value in values.items():
        section, _, name = path.partition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    try:
        check_config(config)
    except InputError as error:
        return str(error)
    return ""


def table() -> str:
    """Both tables, and the messages of what is refused, numbered in the order of the cells."""
    notes: dict[str, int] = {}

    def cell(one: Values, two: Values) -> str:
        found = problem(one, two)
        return str(notes.setdefault(found, len(notes) + 1)) if found else "yes"

    names = [*AXES]
    lines = [f"| | {' | '.join(names[1:])} |", f"|---|{'---|' * (len(names) - 1)}"]
    for place, name in enumerate(names[:-1]):
        cells = [""] * place + [cell(AXES[name], AXES[other]) for other in names[place + 1 :]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [
        f"| {part} | {' | '.join(cell(values, AXES[name]) for name in names)} |" for part, values in PARTS.items()
    ]
    pairs = [*combinations(names, 2)]
    count = sum(not problem(AXES[one], AXES[two]) for one, two in pairs)
    every = len(PARTS) * len(names)
    parts = sum(not problem(values, AXES[name]) for values in PARTS.values() for name in names)
    lines += ["", f"{count} of the {len(pairs)} pairs above go together, and {parts} of the {every} below them.", ""]
    lines += [f"{number}. {_escaped(note)}" for note, number in notes.items()]
    lines += ["", "Three at a time go together if each two of them do, but for these:", ""]
    lines += [f"* {', '.join(names)}: {_escaped(note)}" for names, note in triples()]
    return "\n".join(lines)


def triples() -> list[tuple[tuple[str, str, str], str]]:
    """Names of three ways of which each two go together, and why all three do not; one of each message and pair."""
    ways = {**AXES, **PARTS, **FURTHER}
    allowed = {pair for pair in combinations(ways, 2) if not problem(*(ways[name] for name in pair))}
    found: dict[str, tuple[str, str, str]] = {}
    for three in combinations(ways, 3):
        if all(pair in allowed for pair in combinations(three, 2)) and (
            note := problem(*(ways[name] for name in three))
        ):
            found.setdefault(note, three)
    return [(three, note) for note, three in found.items()]


def _escaped(note: str) -> str:
    return note.replace("|", "&#124;")


def rewritten(page: str) -> str:
    """`page` with the tables between the markers replaced."""
    return between(page, BEGIN, END, table())


def main() -> int:
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
