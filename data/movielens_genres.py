"""The genres of MovieLens' films, read from the file beside the ratings: a list of genre numbers per film.

    movies.csv   movieId,title,genres        genres joined by |, titles optionally quoted
    movies.dat   movie::title::genres
    u.item       movie|title|three more|19 flags, the first of them for "unknown"

Genres of the first two are numbered alphabetically, those of u.item by column. A film without known genres ("(no genres
listed)", "unknown", or not in the file) has an empty list. Empty lines are skipped.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError

__all__ = ["SIDE_FILES", "FilmGenres", "read_genres"]

_NO_GENRES = ("", "(no genres listed)", "unknown")
_BYTE_ORDER_MARK = "\xef\xbb\xbf"  # of UTF-8, as Latin-1 shows it
_FIRST_FLAG = 5
_NUM_FLAGS = 19


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilmGenres:
    """Genres of films in CSR form.

    Attributes:
        path: the file they come from.
        films: int64 ``[films]``, ascending.
        bounds: int64 ``[films + 1]``: the genres of film i are ``genres[bounds[i]:bounds[i + 1]]``.
        genres: int64, numbers from 0.
    """

    path: str
    films: NDArray[np.int64]
    bounds: NDArray[np.int64]
    genres: NDArray[np.int64]

    @property
    def num_genres(self) -> int:
        return int(self.genres.max(initial=-1)) + 1

    def of(self, films: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The concatenated genres of some films, and the number of genres of each; unknown films have none."""
        positions = np.minimum(np.searchsorted(self.films, films), max(self.films.size - 1, 0))
        known = self.films[positions] == films if self.films.size else np.zeros(films.shape, np.bool_)
        first = np.where(known, self.bounds[positions], 0)
        lengths = np.where(known, self.bounds[positions + 1] - first, 0) if self.films.size else first
        ends = np.cumsum(lengths)
        picked = np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(first - (ends - lengths), lengths)
        return self.genres[picked], lengths.astype(np.int32)


def read_genres(path: str) -> FilmGenres:
    """Read `movies.csv`, `movies.dat` or `u.item`, chosen by name.

    Raises:
        InputError: the file is unreadable, or a line is malformed.
    """
    read = SIDE_FILES[Path(path).name]
    rows: dict[int, list[str]] = {}
    try:
        # Latin-1 decodes any byte; only titles, which are ignored, go beyond ASCII.
        with open(path, encoding="latin-1", newline="") as stream:
            for line, film, names in read(path, stream):
                if not film.isascii() or not film.isdigit() or len(film) > 18:
                    raise InputError(f"{path}:{line}: expected the number of a film, got {film[:40]!r}")
                rows[int(film)] = names
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    names = sorted({name for found in rows.values() for name in found})
    numbers = {name: number for number, name in enumerate(names)}
    films = sorted(rows)
    bounds = np.zeros(len(films) + 1, np.int64)
    np.cumsum([len(rows[film]) for film in films], out=bounds[1:])
    return FilmGenres(
        path=path,
        films=np.array(films, np.int64),
        bounds=bounds,
        genres=np.array([numbers[name] for film in films for name in rows[film]], np.int64),
    )


Rows = Iterator[tuple[int, str, list[str]]]


def _split(genres: str) -> list[str]:
    return [name for name in dict.fromkeys(genres.split("|")) if name not in _NO_GENRES]


def _csv_rows(path: str, stream: Iterator[str]) -> Rows:
    reader = csv.reader(stream)
    try:
        header = [name.removeprefix(_BYTE_ORDER_MARK).strip(' "') for name in next(reader, [])]
        if not {"movieId", "genres"} <= set(header):
            raise InputError(f"{path}:1: expected the header movieId,title,genres, got {','.join(header)[:80]!r}")
        film, genres = header.index("movieId"), header.index("genres")
        for fields in filter(None, reader):
            if len(fields) != len(header):
                raise InputError(f"{path}:{reader.line_num}: expected {len(header)} columns, got {len(fields)}")
            yield reader.line_num, fields[film], _split(fields[genres])
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: expected comma-separated values, got {error}") from None


def _lines(stream: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Non-empty lines without line ends, and their numbers."""
    lines = ((number, text.rstrip("\r\n")) for number, text in enumerate(stream, start=1))
    return ((number, text) for number, text in lines if text)


def _dat_rows(path: str, stream: Iterator[str]) -> Rows:
    for line, text in _lines(stream):
        fields = text.split("::")
        if len(fields) != 3:
            raise InputError(f"{path}:{line}: expected 3 columns separated by '::', got {len(fields)}")
        yield line, fields[0], _split(fields[2])


def _item_rows(path: str, stream: Iterator[str]) -> Rows:
    for line, text in _lines(stream):
        fields = text.split("|")
        flags = fields[_FIRST_FLAG:]
        if len(flags) != _NUM_FLAGS or not set(flags) <= {"0", "1"}:
            expected = f"{_FIRST_FLAG + _NUM_FLAGS} columns separated by '|', the last {_NUM_FLAGS} of them 0 or 1"
            raise InputError(f"{path}:{line}: expected {expected}, got {text[-80:]!r}")
        # Zero-padded, so that alphabetical order is column order. The first flag means "unknown".
        yield line, fields[0], [f"{number:02}" for number, flag in enumerate(flags) if flag == "1" and number]


#: By file name: the parser of its lines, which yields line number, film and names of its genres.
SIDE_FILES: Mapping[str, Callable[[str, Iterator[str]], Rows]] = {
    "movies.csv": _csv_rows,
    "movies.dat": _dat_rows,
    "u.item": _item_rows,
}
