"""MovieLens' ratings in their three published layouts; the first line tells which.

    u.data        user TAB film TAB rating TAB time           100k
    ratings.dat   user::film::rating::time                    1M, 10M
    ratings.csv   userId,movieId,rating,timestamp             latest, 20M, 25M, 32M; with a header, columns by name

    label     1 if the rating is at least 4 ([movielens] positive_rating of the schema file), else 0
    user, film                    raw ids
    genres    multi-hot, mean-pooled; if movies.csv, movies.dat or u.item lies beside the ratings

No dense columns. The time, in seconds since 1970 UTC, is read only where it is wanted. In a folder, the ratings are
found by name.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass, field

import numpy as np

from bagpipe.errors import InputError
from bagpipe.files.access import is_folder, is_remote, join
from bagpipe.files.data_folder import tell_left_out
from bagpipe.types.schema import DataSchema, Feature, Table
from data.clock import Clock
from data.columns import Columns
from data.delimited import Column, DelimitedFile, Kind, explain_line, find_columns, good_columns, split_fields
from data.movielens_genres import SIDE_FILES, FilmGenres, read_genres
from data.number_parsing import quote
from data.source import Block, Segment
from data.text_files import (
    BLOCK_BYTES,
    TextSource,
    first_line,
    list_files,
    read_text,
    text_segments,
    whole_folder,
)

__all__ = ["MovieLensSource", "find_genres", "movielens_schema"]

#: Names of rating files in a folder, each optionally followed by .gz.
RATING_FILES = ("ratings.csv", "ratings.dat", "u.data")

_NUMBER = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")
_ID = Kind(words="an integer of up to 16 digits", pattern=re.compile(rb"-?[0-9]{1,16}"))
_RATING = Kind(
    words="a rating of up to 8 characters, like 3.5", pattern=_NUMBER, test=lambda text: len(text) <= 8
)  # the size of a word
_TIME = Kind(words="a time in whole seconds since 1970", pattern=_ID.pattern)
#: The columns read, by their names in ratings.csv.
COLUMNS = (
    Column(name="userId", kind=_ID, required=True),
    Column(name="movieId", kind=_ID, required=True),
    Column(name="rating", kind=_RATING, required=True),
)
#: The same where times are wanted.
_TIMED_COLUMNS = (*COLUMNS, Column(name="timestamp", kind=_TIME, required=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A layout of ratings: the separator of its columns, and whether the first line names them."""

    separator: str
    header: bool = False

    @property
    def split_at(self) -> bytes:
        """The single byte that the reader splits at."""
        return b"," if self.separator == "," else b"\t"

    def starts(self, line: bytes) -> bool:
        """Whether a file with this first line has this form."""
        separators = line.count(self.separator.encode())
        return separators >= 2 and not line[:1].isdigit() if self.header else separators == 3


FORMS = (Form(separator="::"), Form(separator="\t"), Form(separator=",", header=True))


def movielens_schema(with_genres: bool) -> DataSchema:
    """Features and tables `user`, `film` and optionally `genres`: raw 64-bit ids; genres are mean-pooled."""
    names = ("user", "film", "genres") if with_genres else ("user", "film")
    return DataSchema(
        label="liked",
        dense=(),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name, pooling="mean" if name == "genres" else "sum") for name in names),
    )


def find_genres(path: str) -> FilmGenres | None:
    """The genres beside the ratings at `path` (a file or its folder), or None; InputError for a malformed file."""
    if is_remote(path):
        return None
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    names = _genre_files(folder)
    return read_genres(os.path.join(folder, names[0])) if names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLensSource(TextSource):
    """One file of ratings.

    Attributes:
        ratings: the file.
        form: its layout.
        genres: of films, or None.
        positive_rating: the lowest rating with label 1.
        schema: `movielens_schema`; tables can be hashed or bounded.
        bad_rows: stop or skip.
        block_bytes: approximate text in a block.
        reads_times: see `data.clock.Clocked`. The last position of `ratings` is then that of the times.
    """

    ratings: DelimitedFile
    form: Form
    genres: FilmGenres | None = None
    positive_rating: float = 4.0
    schema: DataSchema = field(default_factory=lambda: movielens_schema(with_genres=False))
    bad_rows: str = "stop"
    block_bytes: int = BLOCK_BYTES
    reads_times: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.positive_rating):
            raise InputError(f"positive_rating must be a finite number, got {self.positive_rating}")
        table = self.schema.tables[-1]
        num_genres = 0 if self.genres is None else self.genres.num_genres
        if table.rows is not None and not table.hash and table.rows < num_genres:
            raise InputError(f"table {table.name!r}: expected rows for {num_genres} genres, got {table.rows}")

    @classmethod
    def at(cls, path: str, **options: object) -> MovieLensSource:
        """The source of a file or folder; the first line tells its layout.

        Raises:
            InputError: it does not exist, or its first line has no known layout.
        """
        file = _rating_file(path)
        line = first_line(file)
        form = next((form for form in FORMS if form.starts(line)), None)
        if form is None:
            raise InputError(
                f"{file}:1: expected user, film, rating and time separated by '::' or tabs, or a header "
                f"userId,movieId,rating,timestamp, got {quote(line.rstrip())}"
            )
        ratings = DelimitedFile(path=file, num_columns=4, positions=(0, 1, 2))
        if form.header:
            ratings = find_columns(file, line, form.separator, COLUMNS)
        return cls(ratings=ratings, form=form, **options)  # type: ignore[arg-type]

    @property
    def clock(self) -> Clock:
        """See `data.clock.Clocked`."""
        return Clock(name="timestamp", is_named=False)

    def with_times(self) -> MovieLensSource:
        """See `data.clock.Clocked`."""
        ratings = dataclasses.replace(self.ratings, positions=(0, 1, 2, 3))
        if self.form.header:
            file = self.ratings.path
            ratings = find_columns(file, first_line(file), self.form.separator, _TIMED_COLUMNS)
        return dataclasses.replace(self, ratings=ratings, reads_times=True)

    @property
    def _columns(self) -> tuple[Column, ...]:
        return _TIMED_COLUMNS if self.reads_times else COLUMNS

    @property
    def files(self) -> tuple[str, ...]:
        return (self.ratings.path,) if self.genres is None else (self.ratings.path, self.genres.path)

    @property
    def multi_hot(self) -> frozenset[str]:
        return frozenset({"genres"}) if self.genres is not None else frozenset()

    @property
    def layout(self) -> str:
        return f"movielens/{self.block_bytes}"

    def segments(self) -> tuple[Segment, ...]:
        return text_segments(self.ratings.path, self.block_bytes, header=self.form.header)

    def read(self, block: Block) -> Columns:
        text = read_text(block)
        if self.form.separator == "::":  # fields are split at a single byte, so tabs replace '::'
            text = text.replace(b"\t", b"?").replace(b"::", b"\t")
        fields = split_fields(text, self.form.split_at, self.ratings.num_columns)
        user, film, rating, *time = self.ratings.positions
        ids, bad_ids = fields.integers((user, film))
        present = fields.present((user, film))
        wrong = bad_ids | ~fields.present(self.ratings.positions).all(axis=0)
        times_s = None
        if time:
            (times_s,), bad_times = fields.integers(time)
            wrong |= bad_times
        ratings, bad_ratings = fields.distinct(rating, _rating)
        return good_columns(
            fields,
            schema=self.schema,
            labels=(ratings >= self.positive_rating).astype(np.float32),
            ids=ids,
            present=present,
            wrong=wrong | bad_ratings,
            bags=[] if self.genres is None else [self.genres.of(ids[1])],
            error=self._explain if self.bad_rows == "stop" else None,
            block=block,
            times_s=times_s,
        )

    def _explain(self, line: bytes) -> str | None:
        """Explain what is wrong with a line of the text after replacement of its separators."""
        if self.form.separator == "::":
            line = line.replace(b"\t", b"::")
        return explain_line(line, self.form.separator.encode(), self.ratings, self._columns)


def _rating(text: bytes) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _rating_file(path: str) -> str:
    if not is_folder(path):
        return list_files(path)[0]
    names = [name + ending for name in RATING_FILES for ending in ("", ".gz")]
    content = whole_folder(path)
    found = [name for name in content.files if name.rpartition("/")[2] in names]
    if len(found) != 1:
        known, got = ", ".join(RATING_FILES), " and ".join(found) or "none"
        raise InputError(f"{path}: expected one of {known} (or .gz) in the folder, got {got}")
    genres = () if is_remote(path) else _genre_files(path)[:1]
    unused = [name for name in content.files if name not in (*found, *genres)]
    tell_left_out(path, [*unused, *content.left_out], "only ratings and genres are read")
    return join(path, found[0])


def _genre_files(folder: str) -> list[str]:
    return [name for name in SIDE_FILES if os.path.isfile(os.path.join(folder, name))]
