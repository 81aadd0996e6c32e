from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError
from data.criteo_skew import CRITEO_KAGGLE_ROWS
from data.synthetic_options import DEFAULT_ROWS, SyntheticFeature, options_at
from data.zipf import ZipfLaw


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "synthetic.toml"
    path.write_text(text)
    return str(path)


def test_defaults_have_criteos_shape() -> None:
    options = options_at("")
    assert options.rows == DEFAULT_ROWS
    assert [table.name for table in options.schema.tables] == [f"C{number}" for number in range(1, 27)]
    assert len(options.schema.dense) == 13
    assert options.features[13].missing == 0.4204


def test_full_scale() -> None:
    options = options_at("", profile="criteo-kaggle")
    assert tuple(feature.law.vocabulary for feature in options.features) == CRITEO_KAGGLE_ROWS


def test_any_number_of_tables(tmp_path: Path) -> None:
    assert len(options_at("", tables=3).features) == 3
    assert len(options_at(write(tmp_path, "[synthetic]\ntables = 60")).schema.features) == 60


def test_own_columns(tmp_path: Path) -> None:
    text = """
    label = "y"
    sparse = ["user", { name = "items", table = "item" }]
    [tables.item]
    rows = 500
    pooling = "mean"
    [synthetic]
    rows = 1000
    label_rate = 0.5
    [synthetic.features.items]
    bag = 8
    bag_law = "poisson"
    missing = 0.25
    exponent = 1
    """
    options = options_at(write(tmp_path, text))
    assert (options.rows, options.label_rate) == (1000, 0.5)
    items = options.features[1]
    assert (items.law.vocabulary, items.law.exponent, items.bag, items.missing) == (500, 1.0, 8.0, 0.25)


BAD = [
    ("[synthetic]\nrow = 1", "synthetic: unknown key 'row'"),
    ("[synthetic]\nrows = 0", "synthetic rows must be at least 1, got 0"),
    ("[synthetic]\nrows_per_day = 0", "synthetic rows_per_day must be at least 1, got 0"),
    ("time = 't'\ntime_unit = 'd'", "time_unit must be one of s, ms, us, got 'd'"),
    ("[synthetic]\nlabel_rate = 1.0", "synthetic label_rate must be between 0 and 1, got 1.0"),
    ("[synthetic]\ntables = 0", "synthetic tables must be at least 1, got 0"),
    ("[synthetic]\nprofile = 'x'", "synthetic profile must be one of criteo-sample, criteo-kaggle, got 'x'"),
    ("[synthetic.features.Z]\nbag = 2", "synthetic.features.Z: no such feature"),
    ("[synthetic.features]\nC1 = 2", "synthetic.features.C1 must be a table, got 2"),
    ("[synthetic.features.C1]\nbags = 2", "synthetic.features.C1: unknown key 'bags'"),
    ("[synthetic.features.C1]\nbag = 0", "bag must be between 1 and 10000 ids, got 0.0"),
    ("[synthetic.features.C1]\nbag = 1.5", "bag must be a whole number unless"),
    ("[synthetic.features.C1]\nbag_law = 'zeta'", "bag_law must be one of fixed, poisson, geometric, got 'zeta'"),
    ("[synthetic.features.C1]\nmissing = 2", "missing must be a share between 0 and 1, got 2.0"),
    (
        "[synthetic.features.C1]\nvocabulary = 9\n[tables.C1]\nrows = 5",
        "vocabulary 9 does not fit into table 'C1' of 5",
    ),
    ("label='y'\nsparse=['a']\n[synthetic]\ntables = 3", "tables counts made-up columns"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        options_at(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mean", [1.0, 1.5, 40.0, 3000.0])
def test_poisson_bags_have_the_mean_and_spread(mean: float) -> None:
    feature = SyntheticFeature(law=ZipfLaw(vocabulary=2), bag=mean, bag_law="poisson")
    lengths = feature.draw_lengths(np.random.Generator(np.random.Philox(0)), 20_000)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.var() == pytest.approx(mean - 1, rel=0.05)
    assert lengths.min() >= 1
