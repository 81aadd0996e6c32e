"""Comparison of a job's facts with those of the checkpoint that it resumes."""

from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import InputError
from bagpipe.jobs.job_facts import changes, compare
from tests.jobs.facts import FACTS, IDENTITY, identity_with, trained


def test_allowed_differences_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = trained()
    settings = {key: value for key, value in manifest.settings.items() if key != "run.threads"}
    compare(dataclasses.replace(manifest, settings=settings), FACTS)  # from before the key existed
    assert capsys.readouterr().err == ""
    moved = dataclasses.replace(FACTS, identity=identity_with(name="/moved/day"))
    compare(manifest, moved)
    assert capsys.readouterr().err == ""
    compare(manifest, dataclasses.replace(FACTS, identity=dataclasses.replace(IDENTITY, code="d")))
    assert "was made with other cacher code" in capsys.readouterr().err


def test_full_hashes_and_a_checkpoint_of_sampled_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """`data.identity` can change; what could not be compared is said."""
    facts = dataclasses.replace(FACTS, identity=identity_with(sections=("s",)))
    compare(trained(), facts)
    assert "step 8 recorded sampled blocks of the data files: bytes between them were not" in capsys.readouterr().err
    compare(dataclasses.replace(trained(), identity=facts.identity_record), FACTS)
    compare(dataclasses.replace(trained(), identity=facts.identity_record), facts)
    assert capsys.readouterr().err == ""


def test_a_checkpoint_of_format_version_1_records_no_content(capsys: pytest.CaptureFixture[str]) -> None:
    old = dataclasses.replace(trained(), identity={"data": "1 files of 100 bytes (0123)", "code": "c"})
    compare(old, FACTS)
    assert "step 8 recorded no content of the data files: only their number and total" in capsys.readouterr().err
    with pytest.raises(InputError, match="other data: it has 1 files of 99 bytes, not 1 files of 100 bytes: use"):
        compare(old, dataclasses.replace(FACTS, identity=identity_with(num_bytes=99)))
    generated = dataclasses.replace(FACTS, identity=dataclasses.replace(IDENTITY, files=()))
    compare(dataclasses.replace(old, identity={"data": "0 files of 0 bytes (0123)", "code": "c"}), generated)
    assert capsys.readouterr().err == ""


def test_another_arithmetic_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"device": "cpu", "CPU capability": "AVX512"}
    facts = dataclasses.replace(FACTS, arithmetic=(ours,))
    compare(trained({**ours, "CPU capability": "AVX2"}), facts)
    assert capsys.readouterr().err == (
        "note: the checkpoint at step 8 was made with CPU capability 'AVX2', this job has 'AVX512': results are no "
        "longer bit-identical to those of an uninterrupted run\n"
    )


def test_the_first_rank_with_another_arithmetic_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = {"CPU capability": "AVX512"}, {"CPU capability": "AVX2"}
    checkpoint = dataclasses.replace(trained(one, one, one), world_size=3)
    compare(checkpoint, dataclasses.replace(FACTS, world_size=3, arithmetic=(one, other, other)))
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with CPU capability 'AVX512' on rank 1, this job has 'AVX2': results are no longer" in line


def test_nothing_is_said_of_the_same_or_an_unknown_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of earlier versions record none; at checkpoint 0 nothing was computed."""
    ours = {"device": "cpu", "CPU capability": "AVX512"}
    facts = dataclasses.replace(FACTS, arithmetic=(ours,))
    compare(trained(ours), facts)
    compare(trained(), facts)
    compare(dataclasses.replace(trained({"CPU capability": "AVX2"}), parts=()), facts)
    assert capsys.readouterr().err == ""


def test_data_that_is_not_known_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A training loop that gets its batches from its caller knows no files."""
    facts = dataclasses.replace(FACTS, identity=None)
    assert facts.identity_record == {}
    compare(trained(), facts)
    compare(dataclasses.replace(trained(), identity=facts.identity_record), FACTS)
    assert capsys.readouterr().err == ""


def test_settings_without_a_default_are_compared() -> None:
    facts = dataclasses.replace(FACTS, settings={**FACTS.settings, "dropout": 0.5})
    with pytest.raises(InputError, match=r"the checkpoint at step 8 was made with dropout .*, this job has 0\.5: use"):
        compare(trained(), facts)
    compare(trained(), dataclasses.replace(facts, defaults={"dropout": 0.5, "another": 1}))


def test_other_rows_are_named_by_what_differs() -> None:
    """Fields that a schema leaves out are compared as what they stand for."""
    half = dataclasses.replace(FACTS.rows.tables[0], dtype="float16")
    rows = dataclasses.replace(FACTS.rows, tables=(half, *FACTS.rows.tables[1:]), rounding="stochastic")
    with pytest.raises(InputError, match=r"rows\.tables\[0\]\.dtype 'float32', this job has 'float16'"):
        compare(trained(), dataclasses.replace(FACTS, rows=rows))
    same = dataclasses.replace(FACTS.rows.tables[0], dtype=FACTS.rows.dtype, optimizer=FACTS.rows.optimizer)
    compare(trained(), dataclasses.replace(FACTS, rows=dataclasses.replace(FACTS.rows, tables=(same,))))


def test_a_setting_changes_only_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    facts = dataclasses.replace(FACTS, settings={**FACTS.settings, "run.threads": 2, "optim.dense": "adam"})
    named = dataclasses.replace(facts, changeable=frozenset({"run.threads", "data.batch_size"}))
    with pytest.raises(InputError, match=r"was made with optim\.dense 'adagrad', this job has 'adam'"):
        compare(trained(), named)
    assert capsys.readouterr().err == ""
    both = dataclasses.replace(named, changeable=frozenset({"run.threads", "optim.dense"}))
    compare(trained(), both)
    assert capsys.readouterr().err.splitlines() == [
        "note: optim.dense changes from 'adagrad' to 'adam' at step 8",
        "note: run.threads changes from 1 to 2 at step 8",
    ]
    assert changes(trained(), both) == (
        {"key": "optim.dense", "step": 8, "before": "adagrad", "after": "adam"},
        {"key": "run.threads", "step": 8, "before": 1, "after": 2},
    )
    assert changes(trained(), dataclasses.replace(FACTS, changeable=both.changeable)) == ()
