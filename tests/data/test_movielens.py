from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.columnar_writer import write_columnar
from data.columns import Columns
from data.formats import open_source
from data.loader import LookaheadLoader
from data.movielens import MovieLensSource
from data.row_order import RowIndex
from data.source import Block, Source
from data.testing import assert_same_batches, check_source, read_all
from tests.data.test_movielens_genres import MOVIES_CSV, MOVIES_DAT, U_ITEM, write
from tests.effort import at_most

HEADER = "userId,movieId,rating,timestamp"

#: Name of a file -> separator, first lines, the genre file.
FORMS = {
    "u.data": ("\t", [], "u.item", U_ITEM),
    "ratings.dat": ("::", [], "movies.dat", MOVIES_DAT),
    "ratings.csv": (",", [HEADER], "movies.csv", MOVIES_CSV),
}
FILMS = {3: [0], 11: [0, 1, 2]}  # films of the genre files with their genres

Rating = tuple[int, int, str]


def draw(rows: int, seed: int = 0) -> list[Rating]:
    rng = random.Random(seed)
    users = [rng.randrange(10 ** rng.randint(1, 16)) for _ in range(rows)]
    ratings = ["0.5", "1", "3.5", "3.9", "4.0", "4", "5"]
    return [(user, rng.choice([3, 7, 11, 10**15]), rng.choice(ratings)) for user in users]


def text_of(name: str, ratings: list[Rating], end: str = "\n") -> str:
    separator, first, *_ = FORMS[name]
    lines = [separator.join([str(user), str(film), rating, "978300760"]) for user, film, rating in ratings]
    return "".join(line + end for line in [*first, *lines])


def read_blocks(source: Source) -> list[Columns]:
    return [source.read(block) for segment in source.segments() for block in source.blocks(segment)]


def examples(columns: Columns) -> list[tuple[float, int, int, list[int]]]:
    """Label, user, film and genres of each row."""
    values = columns.values.tolist()
    n = columns.num_rows
    genres = iter(values[2 * n :])
    bags = [
        [next(genres) for _ in range(count)] for count in (columns.lengths[2] if len(columns.lengths) > 2 else [0] * n)
    ]
    return list(zip(columns.labels.tolist(), values[:n], values[n : 2 * n], bags, strict=True))


def expected(ratings: list[Rating], positive: float = 4.0) -> list[tuple[float, int, int, list[int]]]:
    return [(float(float(r) >= positive), user, film, FILMS.get(film, [])) for user, film, r in ratings]


def folder_of(folder: Path, name: str, ratings: list[Rating]) -> DataConfig:
    """A folder with ratings and genres."""
    write(folder, name, text_of(name, ratings))
    write(folder, *FORMS[name][2:])
    return DataConfig(format="movielens", path=str(folder))


@pytest.mark.parametrize("name", FORMS)
@at_most(30)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 12), end=st.sampled_from(["\n", "\r\n"]))
def test_written_files_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, rows: int, end: str
) -> None:
    folder, ratings = tmp_path_factory.getbasetemp() / name, draw(rows, seed)
    folder.mkdir(exist_ok=True)
    write(folder, *FORMS[name][2:])
    path = write(folder, name, text_of(name, ratings, end))
    for place in (path, str(folder)):
        source = open_source(DataConfig(format="movielens", path=place))
        assert source.multi_hot == {"genres"}
        assert source.schema.table("genres").pooling == "mean"
        (columns,) = read_blocks(source)
        assert examples(columns) == expected(ratings)


@pytest.mark.parametrize("name", FORMS)
def test_without_a_file_of_genres_there_are_two_features(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "ratings of mine.txt", text_of(name, [(1, 3, "4"), (2, 99, "3.5")]))
    source = open_source(DataConfig(format="movielens", path=path))
    assert [feature.name for feature in source.schema.features] == ["user", "film"]
    assert source.multi_hot == frozenset()
    assert [examples(columns) for columns in read_blocks(source)] == [[(1.0, 1, 3, []), (0.0, 2, 99, [])]]


def test_columns_of_a_csv_are_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "r.csv", "when,rating,movieId,what,userId\n1,5,7,x,42\n")
    (columns,) = read_blocks(MovieLensSource.at(path))
    assert examples(columns) == [(1.0, 42, 7, [])]


BAD = [
    # fields of a line, what the message says
    (["", "3", "4", "0"], "expected an integer of up to 16 digits in userId (column 1), got ''"),
    (["1", "x", "4", "0"], "expected an integer of up to 16 digits in movieId (column 2), got 'x'"),
    (["1", "9" * 17, "4", "0"], f"expected an integer of up to 16 digits in movieId (column 2), got '{'9' * 17}'"),
    (["1", "3", "", "0"], "expected a rating of up to 8 characters, like 3.5 in rating (column 3), got ''"),
    (["1", "3", "-1", "0"], "expected a rating of up to 8 characters, like 3.5 in rating (column 3), got '-1'"),
    (["1", "3", "nan", "0"], "expected a rating of up to 8 characters, like 3.5 in rating (column 3), got 'nan'"),
    (["1", "3", "4.1234567", "0"], "expected a rating of up to 8 characters, like 3.5 in rating (column 3), got '4.1"),
    (["1", "3", "4"], "expected 4 columns separated by"),
    (["1", "3", "4", "0", "0"], "expected 4 columns separated by"),
    (["1\0", "3", "4", "0"], "expected text, got a NUL at byte 2 of the line"),
    ([], "expected 4 columns separated by"),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, name: str, fields: list[str], message: str) -> None:
    separator, first, *_ = FORMS[name]
    ratings = draw(30)
    lines = text_of(name, ratings).split("\n")
    place = len(first) + 17
    path = write(tmp_path, name, "\n".join([*lines[:place], separator.join(fields), *lines[place:]]))
    write(tmp_path, *FORMS[name][2:])
    for block_bytes in (50, 1 << 20):
        with pytest.raises(InputError) as raised:
            read_blocks(MovieLensSource.at(path, block_bytes=block_bytes))
        assert str(raised.value).startswith(f"{path}:{place + 1}: {message}")
        assert "\n" not in str(raised.value)
    (columns,) = read_blocks(open_source(DataConfig(format="movielens", path=path, bad_rows="skip")))
    assert columns.bad_rows.tolist() == [17]
    assert examples(columns) == expected(ratings)


def test_single_colons_and_tabs_are_no_separators(tmp_path: Path) -> None:
    path = write(tmp_path, "ratings.dat", "1::2::3::4\n1:2::3::4\n1\t2::3::4::5\n1:::2::3::4\n")
    (columns,) = read_blocks(MovieLensSource.at(path, bad_rows="skip"))
    assert columns.bad_rows.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty, expected lines of text"),
        (HEADER + "\n", "the file holds nothing but its header, expected lines of data"),
        ("1 2 3 4\n", "expected user, film, rating and time separated by '::' or tabs, or a header userId,movieId,"),
        ("1,2,3,4\n", "expected user, film, rating and time separated by '::' or tabs, or a header userId,movieId,"),
        (
            "userId,movieId,score\n1,2,3\n",
            "expected a header with a column 'rating', got none in 'userId,movieId",
        ),
    ],
)
def test_files_of_another_kind(tmp_path: Path, ending: str, text: str, message: str) -> None:
    path = tmp_path / f"ratings.csv{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending else text.encode())
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read_blocks(MovieLensSource.at(str(tmp_path)))
    assert str(raised.value).startswith(str(path))


def test_a_folder_must_hold_the_ratings_once(tmp_path: Path) -> None:
    write(tmp_path, "movies.csv", MOVIES_CSV)
    with pytest.raises(
        InputError, match=r"expected one of ratings.csv, ratings.dat, u.data \(or .gz\) in .*, got none"
    ):
        MovieLensSource.at(str(tmp_path))
    write(tmp_path, "ratings.csv", "")
    write(tmp_path, "u.data", "")
    with pytest.raises(InputError, match=r"got ratings\.csv and u\.data"):
        MovieLensSource.at(str(tmp_path))


def test_the_schema_file_changes_tables_and_the_label(tmp_path: Path) -> None:
    ratings = draw(30)
    schema = write(tmp_path, "schema.toml", "[movielens]\npositive_rating = 3.9\n[tables.user]\nrows = 5\nhash = true")
    config = folder_of(tmp_path, "u.data", ratings)
    config = DataConfig(**{**vars(config), "schema": schema})
    (columns,) = read_blocks(open_source(config))
    found = examples(columns)
    assert [row[0] for row in found] == [row[0] for row in expected(ratings, 3.9)]
    assert {row[1] for row in found} <= set(range(5))
    assert [row[3] for row in found] == [row[3] for row in expected(ratings)]  # looked up by the film's own id
    for text, message in (
        ("[movielens]\npositive = 4", "movielens: unknown key 'positive', known keys: positive_rating"),
        ("[movielens]\npositive_rating = 'all'", "movielens: positive_rating must be a number, got 'all'"),
        ("[movielens]\npositive_rating = nan", "positive_rating must be a finite number, got nan"),
        ("[tables.genres]\nrows = 2", "table 'genres': expected rows for 3 genres, got 2"),
        (
            "sparse = ['user']",
            "the columns of movielens are fixed: expected only table_defaults, tables, movielens",
        ),
    ):
        write(tmp_path, "schema.toml", text)
        with pytest.raises(InputError, match=re.escape(message)):
            open_source(config)


def test_genres_are_hashed_where_their_table_says_so(tmp_path: Path) -> None:
    ratings = draw(30)
    config = folder_of(tmp_path, "ratings.csv", ratings)
    schema = write(tmp_path, "schema.toml", "[tables.genres]\nrows = 2\nhash = true")
    (columns,) = read_blocks(open_source(DataConfig(**{**vars(config), "schema": schema})))
    bags = [bag for *_, bag in examples(columns)]
    assert [len(bag) for bag in bags] == [len(bag) for *_, bag in expected(ratings)]
    assert {number for bag in bags for number in bag} <= {0, 1}


@pytest.mark.parametrize("name", [*FORMS, "ratings.csv.gz"])
def test_keeps_a_readers_promises(tmp_path: Path, name: str) -> None:
    ratings = draw(60)
    plain = name.removesuffix(".gz")
    config = folder_of(tmp_path, plain, ratings)
    path = tmp_path / plain
    if plain != name:
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    source = open_source(config)
    assert RowIndex.scan(source, source.segments(), None).num_rows == 60
    assert source.files == (str(tmp_path / name), str(tmp_path / FORMS[plain][2]))
    small = MovieLensSource.at(config.path, block_bytes=300, genres=source.genres, schema=source.schema)  # type: ignore[attr-defined]
    assert [row for columns in read_blocks(small) for row in examples(columns)] == expected(ratings)
    check_source(small)


def test_the_columnar_form_gives_the_same_batches(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, "u.data", draw(60)))
    path = str(tmp_path / "converted.arrow")
    write_columnar(source, path)
    converted = open_source(DataConfig(format="parquet", path=path))
    assert_same_batches(
        read_all(LookaheadLoader(converted, batch_size=16)), read_all(LookaheadLoader(source, batch_size=16))
    )


def test_an_empty_block_of_bad_rows(tmp_path: Path) -> None:
    source = MovieLensSource.at(write(tmp_path, "u.data", "1\t2\t3\t4\n"), bad_rows="skip")
    columns = source.read(Block(file=source.ratings.path, start=0, stop=0, line=1, payload=b"x\ny\n"))
    assert columns.num_rows == 0
    assert columns.bad_rows.tolist() == [0, 1]
