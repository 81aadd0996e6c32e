"""`TrainPipeline`: the same results as a plain loop, whatever the cache; ends, errors and other iterators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bagpipe
from bagpipe.errors import CapacityError, InputError, JobError
from tests.train_pipeline.small import (
    FEATURES,
    RATE,
    ROWS,
    Plain,
    Small,
    assert_same,
    batches,
    pipeline,
    progress_all,
    state_of,
)


def _trained(num: int = 12, **more: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    with pipeline(**more) as trained:
        losses = progress_all(trained, iter(batches(num)))
        return state_of(trained), losses


def test_training_equals_a_plain_loop() -> None:
    model = Small().double()
    with pipeline(model) as trained:
        losses = progress_all(trained, iter(batches(12, dtype=torch.float64)))
        ours = state_of(trained)
    plain = Plain().double()
    dense = torch.optim.Adam(plain.over.parameters(), lr=0.01)
    rows = torch.optim.Adagrad(plain.tables.parameters(), lr=RATE)
    for batch, loss in zip(batches(12, dtype=torch.float64), losses, strict=True):
        expected, _ = plain(batch)
        dense.zero_grad()
        rows.zero_grad()
        expected.backward()
        dense.step()
        rows.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    for name in FEATURES:
        torch.testing.assert_close(ours[f"t_{name}"], plain.tables[name].weight.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours["over.weight"], plain.over.weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "more",
    [{"cache_rows": "auto", "cache_max_rows": 70}, {"lookahead": 1}, {"prefetch_depth": 1}, {"planner": "process"}],
)
def test_results_depend_on_no_setting_of_the_cache(more: dict[str, Any]) -> None:
    direct, direct_losses = _trained(cache_rows=0)
    state, losses = _trained(**more)
    assert_same(state, direct)
    assert torch.equal(torch.stack(losses), torch.stack(direct_losses))


@pytest.mark.redis
def test_without_a_store_a_private_server_holds_the_rows() -> None:
    state, _ = _trained(store=None)
    assert_same(state, _trained()[0])


def test_a_second_iterator_goes_on_and_an_ended_one_can_come_again() -> None:
    class Restarting:
        """An iterator that yields its batches again after its end, as loaders with persistent workers do."""

        def __init__(self) -> None:
            self.left = iter(batches(4))

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            batch = next(self.left, None)
            if batch is None:
                self.left = iter(batches(4, seed=1))
                raise StopIteration
            return batch

    iterator = Restarting()
    with pipeline() as trained:
        assert len(progress_all(trained, iterator)) == 4
        assert len(progress_all(trained, iterator)) == 4
        assert trained.step == 8
        twice = state_of(trained)
    with pipeline() as trained:
        progress_all(trained, iter([*batches(4), *batches(4, seed=1)]))
        assert_same(twice, state_of(trained))


def test_train_yields_the_outputs_of_every_batch() -> None:
    with pipeline() as trained:
        outputs = list(trained.train(batches(5)))
    assert [tuple(scores.shape) for scores in outputs] == [(8,)] * 5


def test_evaluating_and_reading_rows_change_no_bit() -> None:
    with pipeline() as trained:
        iterator = iter(batches(12))
        for step in range(12):
            trained.progress(iterator)
            if step % 3 == 1:
                assert len(list(trained.evaluate(batches(4, seed=9)))) == 4
                assert trained.model.training
                trained.rows("t_f0")[[0, 1]]
        with pytest.raises(StopIteration):
            trained.progress(iterator)
        interrupted = state_of(trained)
    assert_same(interrupted, _trained()[0])


def test_ids_that_training_has_not_seen_are_scored_with_their_initial_rows() -> None:
    seen = batches(3)
    for batch in seen:
        batch["ids"].values().clamp_(max=ROWS // 2)
    with pipeline() as trained:
        progress_all(trained, iter(seen))
        state = state_of(trained)
        scores = list(trained.evaluate(unseen := batches(2, seed=8)))
        num_rows = len(trained.rows("t_f0"))
    model = Plain().float()
    for name in FEATURES:
        model.tables[name].weight.data = state[f"t_{name}"]
    model.over.weight.data, model.over.bias.data = state["over.weight"], state["over.bias"]
    for batch, found in zip(unseen, scores, strict=True):
        torch.testing.assert_close(found, model(batch)[1])
    assert num_rows <= ROWS // 2 + 1  # an evaluation writes no row


def test_learning_rates_can_change_between_steps() -> None:
    def rate(step: int) -> float:
        return 0.1 / (step + 1)

    with pipeline(rows=bagpipe.optim.SGD(rate)) as trained:
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 2, gamma=0.5)
        for _ in trained.train(batches(6)):
            scheduler.step()
        cached = state_of(trained)
    model = Small()
    with pipeline(model, rows=bagpipe.optim.SGD(rate), cache_rows=0) as trained:
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 2, gamma=0.5)
        for _ in trained.train(batches(6)):
            scheduler.step()
        assert_same(cached, state_of(trained))


class _Own(Exception):
    """An error of the user's."""


def test_an_error_of_the_model_is_raised_as_it_is_and_trained_rows_are_stored() -> None:
    class Failing(Small):
        calls = 0

        def forward(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise _Own("in forward")
            return super().forward(batch)

    trained = pipeline(Failing(), store="memory://failing")
    iterator = iter(batches(12))
    for _ in range(4):
        trained.progress(iterator)
    with pytest.raises(_Own, match="in forward"):
        trained.progress(iterator)
    with pytest.raises(JobError, match="the pipeline has failed: _Own"):
        trained.progress(iterator)
    trained.close()
    model = Small()
    with pipeline(model, store="memory://failing", existing="rows-only") as again:
        rows = {f"t_{name}": again.rows(f"t_{name}")[torch.arange(ROWS)] for name in FEATURES}
    with pipeline() as four:
        progress_all(four, iter(batches(12)[:4]))
        expected = state_of(four)
    assert_same(rows, {name: expected[name] for name in rows})


def test_an_error_of_the_iterator_comes_after_the_batches_before_it() -> None:
    def failing() -> Iterator[Any]:
        yield from batches(5)
        raise _Own("in the loader")

    with pipeline() as trained:
        iterator = failing()
        for _ in range(5):
            trained.progress(iterator)
        with pytest.raises(_Own, match="in the loader"):
            trained.progress(iterator)
        five = state_of(trained)
        trained.progress(iter(batches(1, seed=3)))  # training can go on
    assert_same(five, _trained(5)[0])


def test_a_batch_that_does_not_fit_names_the_cache_that_would_do() -> None:
    with pipeline(cache_rows=5) as trained, pytest.raises(CapacityError, match=r"needs \d+ unique rows"):
        progress_all(trained, iter(batches(3)))


def test_an_id_outside_its_table_is_named_after_the_batches_before() -> None:
    many = batches(4)
    many[2]["ids"].values()[0] = ROWS
    with pipeline() as trained:
        iterator = iter(many)
        trained.progress(iterator)
        trained.progress(iterator)
        with pytest.raises(InputError, match=r"batch 2.*\[0, 60\), got 60"):
            trained.progress(iterator)


def test_a_loss_that_is_not_finite_ends_training_or_is_left_out() -> None:
    bad = batches(4)
    bad[1]["labels"][0] = float("nan")
    with pipeline() as trained, pytest.raises(JobError, match="batch 1: the loss is not finite"):
        progress_all(trained, iter(bad))
    with pipeline(nonfinite="skip") as trained:
        progress_all(trained, iter(bad))
        skipped = state_of(trained)
    assert all(bool(torch.isfinite(value).all()) for value in skipped.values())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("cache_rows", [0, 120])
def test_rows_that_an_update_made_infinite_are_not_stored(accumulate: int, cache_rows: int) -> None:
    large: Any = {"rows": bagpipe.optim.SGD(1e9), "row_dtype": "float16", "accumulate": accumulate}
    with pytest.raises(JobError, match=r"table t_f\d id \d+: an update made .* not finite in float16"):
        progress_all(pipeline(cache_rows=cache_rows, **large), iter(batches(1)))


@pytest.mark.parametrize("call", ["export", "save", "progress"])
def test_dense_parameters_that_a_step_made_infinite_are_not_saved(tmp_path: Path, call: str) -> None:
    with pipeline(checkpoint_dir=str(tmp_path / "checkpoints")) as trained:
        trained.progress(iterator := iter(batches(1)))
        trained.model.over.weight.data.fill_(float("inf"))
        calls = {"export": [tmp_path / "export"], "save": [], "progress": [iterator]}
        with pytest.raises(JobError, match=r"made over\.weight not finite; it is not saved"):
            getattr(trained, call)(*calls[call])
        assert not (tmp_path / "export").exists()
        trained.model.over.weight.data.zero_()  # for the checkpoint that the end of the block makes


def test_another_iterator_in_the_middle_is_refused_until_reset() -> None:
    with pipeline() as trained:
        trained.progress(iter(first := batches(6)))
        with pytest.raises(InputError, match="another iterator"):
            trained.progress(iter(first))
        trained.reset()
        trained.progress(iter(batches(2, seed=5)))
        assert trained.step == 2


def test_leaving_the_loop_over_a_loader_makes_room_for_another() -> None:
    with pipeline() as trained:
        for _ in trained.train(batches(6)):
            break
        assert (trained.epoch, trained.position) == (0, 1)
        list(trained.train(batches(3, seed=5)))
        assert (trained.step, trained.epoch, trained.position) == (4, 2, 0)


def test_progress_needs_an_iterator() -> None:
    with pipeline() as trained, pytest.raises(InputError, match=r"such as iter\(loader\), got list"):
        trained.progress(batches(1))  # type: ignore[arg-type]


def test_a_closed_pipeline_says_so() -> None:
    trained = pipeline()
    trained.close()
    trained.close()
    with pytest.raises(JobError, match="the pipeline is closed"):
        trained.progress(iter(batches(1)))


def test_a_model_in_evaluation_mode_is_not_trained() -> None:
    with pipeline() as trained:
        trained.model.eval()
        with pytest.raises(InputError, match=r"call model.train\(\)"):
            trained.progress(iter(batches(1)))


def test_nothing_trains_during_an_evaluation() -> None:
    with pipeline() as trained:
        scores = trained.evaluate(batches(3))
        next(scores)
        with pytest.raises(JobError, match="an evaluation is under way"):
            trained.progress(iter(batches(1)))
        scores.close()  # type: ignore[attr-defined]
        trained.progress(iter(batches(1)))
