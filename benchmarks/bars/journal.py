"""`Journal`: the outcomes of all runs in a file of JSON lines; a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.bars.settings import Outcome, Run

__all__ = ["Journal"]


class Journal:
    """Outcomes by run and basis.

    Args:
        path: of the file; is made by the first outcome.
        basis: what the outcomes depend on beside the run, such as a digest of the data.
    """

    def __init__(self, path: Path, basis: str) -> None:
        self._path = path
        self._basis = basis
        self._known: dict[str, Outcome] = {}
        if path.exists():
            text = path.read_text(encoding="utf-8")
            whole, newline, cut = text.rpartition("\n")
            if cut:  # a line that a stop has cut has no end
                path.write_text(whole + newline, encoding="utf-8")
            for line in whole.splitlines():
                record = json.loads(line)
                self._known[_key(record["basis"], Run(**record["run"]))] = Outcome(**record["outcome"])

    def get(self, run: Run, measure: Callable[[Run], Outcome]) -> Outcome:
        """The outcome of a run, measured unless it is known."""
        key = _key(self._basis, run)
        if key not in self._known:
            outcome = measure(run)
            record = {"basis": self._basis, "run": asdict(run), "outcome": asdict(outcome)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            self._known[key] = outcome
        return self._known[key]


def _key(basis: str, run: Run) -> str:
    return json.dumps([basis, asdict(run)])
