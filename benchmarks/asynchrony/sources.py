"""Data of the quality jobs: for each source a function that makes its files, if any, and gives the flags of the data.

sample      Criteo's click logs, a file of the user
synthetic   drawn by `data.synthetic`: vocabularies of Criteo Kaggle, one fixed effect per id
movielens   drawn by `ratings`: vocabularies of MovieLens 1M, users with tastes, in the order of time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.asynchrony.ratings import write_ratings

__all__ = ["SOURCES"]

_KAGGLE = '[synthetic]\nprofile = "criteo-kaggle"\nrows = {examples}\n'


def _sample(folder: Path, path: str, examples: int, seed: int) -> list[str]:
    return ["--data.path", path, "--data.format", "criteo-tsv"]


def _synthetic(folder: Path, path: str, examples: int, seed: int) -> list[str]:
    schema = folder / "kaggle.toml"
    schema.write_text(_KAGGLE.format(examples=examples), encoding="utf-8")
    return ["--data.schema", str(schema)]


def _movielens(folder: Path, path: str, examples: int, seed: int) -> list[str]:
    write_ratings(folder, examples, seed)
    return ["--data.path", str(folder), "--data.format", "movielens"]


#: Name -> flags of the data section, given a folder for files, the user's file, the number of examples, and the seed.
SOURCES: Mapping[str, Callable[[Path, str, int, int], list[str]]] = {
    "sample": _sample,
    "synthetic": _synthetic,
    "movielens": _movielens,
}
