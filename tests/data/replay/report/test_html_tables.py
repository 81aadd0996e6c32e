"""HTML tables: sort values, failures in red, no empty columns."""

from __future__ import annotations

import dataclasses
import math
import re

from data.replay.report.html_tables import limit_table, record_table, skew_table, threshold_table, trial_table
from tests.data.replay.report.samples import FAILED, FULL, HOSTILE, RANKS, SAVINGS, SINGLE, skew


def test_every_record_is_a_row_with_values_to_sort_by():
    table = record_table(FULL)
    body = table.partition("<tbody>")[2]
    assert body.count("<tr") == len(FULL.records)
    first = FULL.records[0]
    assert f'<td data-v="{first.rows_written}">{first.rows_written:,}</td>' in body


def test_failed_rows_are_marked_and_span_the_figures():
    body = record_table(FULL).partition("<tbody>")[2]
    assert body.count('<tr class="failed">') == sum(record.error is not None for record in FULL.records)
    columns = record_table(FULL).count("<th ")
    assert f'<td class="error" colspan="{columns - 5}"><span>batch 17 needs 7,312 unique rows' in body


def test_the_recommended_row_is_marked_once():
    assert record_table(FULL).count('class="best"') == 1
    assert 'class="best"' not in record_table(SINGLE)


def test_columns_without_any_value_are_left_out():
    assert "exchange now" in record_table(RANKS)
    assert "exchange now" not in record_table(SINGLE)
    titles = re.findall(r"<button[^>]*>([^<]*)", record_table(FAILED))
    assert titles == ["policy", "lookahead", "cache rows", "batch size", "ranks"]


def test_missing_and_undefined_values_are_dashes():
    replay = dataclasses.replace(FULL, trials=(dataclasses.replace(FULL.trials[0], loss=math.nan, auc=None),) * 2)
    replay = dataclasses.replace(replay, trials=(*replay.trials, FULL.trials[0]))
    table = trial_table(replay)
    assert table.count("<td>–</td>") == 4
    assert "nan" not in table


def test_texts_are_escaped():
    table = skew_table([skew(HOSTILE, 3, 0.5)])
    assert "<script" not in table
    assert "<img" not in table
    assert table.count("&lt;/script&gt;&lt;script&gt;") == 2


def test_thresholds_and_limits_are_rows_of_each_batch_size():
    assert threshold_table(FULL) == limit_table(FULL) == ""
    thresholds, limits = threshold_table(SAVINGS), limit_table(SAVINGS)
    assert [text.partition("<tbody>")[2].count("<tr") for text in (thresholds, limits)] == [4, 4]
    assert '<td data-v="0.9">90.00%</td>' in thresholds
    assert '<td data-v="25000.0">25,000</td><td data-v="512">512</td>' in limits
