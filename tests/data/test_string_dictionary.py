from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.string_dictionary import StringDictionary, dictionary_at, write_dictionary

TEXTS = [b"shoe", b"hat, red", b"", b'a "b"\nc', "naïve".encode()]


def write(folder: Path, text: str) -> str:
    (folder / "d.csv").write_text(text)
    return str(folder / "d.csv")


def test_the_file_is_text_that_reads_back(tmp_path: Path) -> None:
    path = str(tmp_path / "d.csv")
    write_dictionary(path, pa.array(TEXTS), np.array([9, 8, 7, 6, 5]), 17)
    assert Path(path).read_text().splitlines()[:3] == ['"id","count","text"', '0,17,""', '1,9,"shoe"']
    found = dictionary_at(path)
    assert found.ids_of(pa.array([*TEXTS[::-1], b"unseen", b"Shoe"])).tolist() == [5, 4, 3, 2, 1, 0, 0]
    assert dictionary_at(path) is found


@given(st.lists(st.binary(max_size=3), unique=True), st.lists(st.binary(max_size=3)))
def test_it_equals_a_dict(texts: list[bytes], asked: list[bytes]) -> None:
    found = StringDictionary.of(pa.array(texts, pa.binary()))
    expected = {text: number for number, text in enumerate(texts, 1)}
    assert found.ids_of(pa.array(asked, pa.binary())).tolist() == [expected.get(text, 0) for text in asked]


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path, "id,count,text\n0,0,\n1,2,a\n")
    assert dictionary_at(path).ids_of(pa.array([b"b"])).tolist() == [0]
    write(tmp_path, "id,count,text\n0,0,\n1,2,a\n2,2,b\n")
    assert dictionary_at(path).ids_of(pa.array([b"b"])).tolist() == [2]


BAD = [
    ("", "not a dictionary of strings: Empty CSV file"),
    ("id,text\n0,a\n", ":1: expected the columns id,count,text, got id,text"),
    ("id,count,text\n", "expected the ids 0, 1, 2, … in order, got none"),
    ("id,count,text\n0,0,\n2,1,a\n", "expected the ids 0, 1, 2, … in order, got 2 as number 1"),
    ("id,count,text\n0,0,\n1,1,a\n2,1,a\n", "expected each string once, got 'a' twice"),
    ("id,count,text\n0,0,\nx,1,a\n", "not a dictionary of strings: In CSV column #0"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=re.escape(path) + ".*" + re.escape(message)) as caught:
        dictionary_at(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_with_the_command_that_builds_it() -> None:
    with pytest.raises(InputError, match=r"/nowhere/d.csv: no such dictionary: `python -m data convert"):
        dictionary_at("/nowhere/d.csv")


def test_bytes_that_are_no_text_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds UTF-8 text, got a string of other bytes: hash the strings"):
        write_dictionary(str(tmp_path / "d.csv"), pa.array([b"\xff"]), np.array([1]), 0)
    assert not list(tmp_path.iterdir())
