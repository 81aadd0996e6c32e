from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError
from data.movielens_genres import FilmGenres, read_genres

MOVIES_CSV = (
    "movieId,title,genres\r\n"
    '11,"American President, The (1995)",Comedy|Drama|Romance\r\n'
    '3,"Caf\xe9, ""Le"" (1994)",Comedy|Comedy\r\n'
    "7,Nameless (1990),(no genres listed)\r\n"
)
MOVIES_DAT = "11::A: B (1995)::Comedy|Drama|Romance\n3::Caf\xe9 (1994)::Comedy\n"


def item_line(film: int, *flags: int) -> str:
    return "|".join(
        [str(film), "Caf\xe9 (1994)", "01-Jan-1994", "", "http://x", *("01"[n in flags] for n in range(19))]
    )


#: Saved by a spreadsheet: byte order mark, quotes, another order, empty lines.
MOVIES_CSV_AGAIN = (
    '\xef\xbb\xbf"title","genres","movieId"\n'
    '"American President, The (1995)","Comedy|Drama|Romance","11"\n'
    '\n"Café (1994)","Comedy","3"\n'
    '"Nameless (1990)","(no genres listed)","7"\n\n'
)
U_ITEM = "\n".join([item_line(11, 5, 8, 14), item_line(3, 5), item_line(7, 0)])


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(text.encode("latin-1"))
    return str(path)


def of(genres: FilmGenres, *films: int) -> list[list[int]]:
    values, lengths = genres.of(np.array(films, np.int64))
    assert values.dtype == np.int64
    assert lengths.dtype == np.int32
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("movies.csv", MOVIES_CSV),
        ("movies.csv", MOVIES_CSV_AGAIN),
        ("movies.dat", MOVIES_DAT),
        ("movies.dat", MOVIES_DAT.replace("\n", "\r\n\r\n")),
        ("u.item", U_ITEM),
        ("u.item", U_ITEM + "\n\n"),
    ],
)
def test_the_genres_of_films_in_any_order(tmp_path: Path, name: str, text: str) -> None:
    genres = read_genres(write(tmp_path, name, text))
    assert genres.num_genres == 3  # Comedy, Drama, Romance: numbered in this order
    assert of(genres, 3, 99, 11, -1, 7, 3) == [[0], [], [0, 1, 2], [], [], [0]]
    assert of(genres, 3) == [[0]]
    assert genres.of(np.zeros(0, np.int64))[0].size == 0


def test_a_file_without_films_knows_none(tmp_path: Path) -> None:
    genres = read_genres(write(tmp_path, "movies.csv", "movieId,title,genres\n"))
    assert genres.num_genres == 0
    assert of(genres, 1, 2) == [[], []]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("movies.csv", "", "1: expected the header movieId,title,genres, got ''"),
        ("movies.csv", "1,A,B\n", "1: expected the header movieId,title,genres, got '1,A,B'"),
        ("movies.csv", "movieId,title,genres\n1,A, the,B\n", "2: expected 3 columns, got 4"),
        ("movies.csv", f"movieId,title,genres\n1,{'A' * 200_000},B\n", "2: expected comma-separated values, got field"),
        ("movies.csv", "movieId,title,genres\n1,A,B\nx1,A,B\n", "3: expected the number of a film, got 'x1'"),
        ("movies.dat", "1::A::B\n2::A\n", "2: expected 3 columns separated by '::', got 2"),
        ("movies.dat", f"{'9' * 19}::A::B\n", "1: expected the number of a film, got '9999999999999999999'"),
        ("u.item", U_ITEM + "|1\n", "3: expected 24 columns separated by '|', the last 19 of them 0 or 1, got '"),
        ("u.item", U_ITEM.replace("|1", "|2"), "1: expected 24 columns separated by '|', the last 19 of them 0 or 1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(InputError, match=re.escape(f"{path}:{message}")) as raised:
        read_genres(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*u\.item: No such file"):
        read_genres(str(tmp_path / "u.item"))
