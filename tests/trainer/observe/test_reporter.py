from __future__ import annotations

import pytest
import torch

from bagpipe.errors import JobError
from bagpipe.pipeline.stream import NullStreams
from tests.trainer.observe.small import Clock, Kept, progress
from trainer.metrics import Quality
from trainer.observe.reporter import Reporter, TrainingFacts


def facts(**values: object) -> TrainingFacts:
    return TrainingFacts(**{"streams": NullStreams(), **values})  # type: ignore[arg-type]


def test_every_sink_has_its_own_pace() -> None:
    clock, live, slow = Clock(), Kept(every_s=1.0), Kept(every_s=10.0)
    with Reporter([live, slow], clock=clock) as reporter, reporter.training(facts(num_steps=4)) as on_batch:
        assert on_batch is not None
        for step in range(1, 5):
            clock.now_s += 4.0
            on_batch(lambda step=step: progress(steps=step, samples=10 * step))
    assert live.told() == [("phase", 0), *(("interval", step) for step in (1, 2, 3, 4))]
    assert slow.told() == [("phase", 0), ("interval", 3), ("interval", 4)]
    assert [event.elapsed_s for event in slow.events] == [0.0, 12.0, 16.0]
    assert [event.values["samples_per_s"] for event in slow.events[1:]] == [2.5, 2.5]
    assert (live.closed, slow.closed) == ([False], [False])


def test_totals_are_asked_only_when_a_sink_is_due() -> None:
    clock = Clock()
    with Reporter([Kept(every_s=1.0)], clock=clock) as reporter, reporter.training(facts()) as on_batch:
        assert on_batch is not None
        on_batch(lambda: pytest.fail("nobody is due"))
        on_batch(progress)


def test_the_last_interval_has_the_final_loss() -> None:
    kept = Kept(every_s=1e9)
    with Reporter([kept]) as reporter, reporter.training(facts(samples=4)) as on_batch:
        assert on_batch is not None
        on_batch(progress)
    assert kept.events[0].values == {"phase": "training", "samples": 4}
    assert kept.events[1].values["loss"] == 0.5


def test_the_norm_of_gradients_comes_with_the_loss() -> None:
    kept, norms = Kept(), iter([torch.tensor(0.25), torch.tensor(torch.nan, dtype=torch.float64), None])
    with Reporter([kept]) as reporter, reporter.training(facts(gradient_norm=lambda: next(norms, None))) as on_batch:
        assert on_batch is not None
        for samples in (10, 20, 30):
            on_batch(lambda samples=samples: progress(samples=samples))
    assert [event.values.get("grad_norm", "missing") for event in kept.events[1:]] == [0.25, None, "missing"]
    assert kept.events[1].values["loss"] == 0.5


def test_a_rank_without_losses_shows_none() -> None:
    kept = Kept()
    with Reporter([kept]) as reporter, reporter.training(facts(shows_loss=False)) as on_batch:
        assert on_batch is not None
        on_batch(lambda: progress(loss_sum=torch.tensor(0.0)))
    assert kept.events[1].values["loss"] is None


def test_a_new_checkpoint_is_an_event() -> None:
    kept, steps = Kept(), iter([7, 7, 12, 12])
    with Reporter([kept]) as reporter, reporter.training(facts(published=lambda: next(steps))) as on_batch:
        assert on_batch is not None
        for samples in (10, 20):
            on_batch(lambda samples=samples: progress(samples=samples))
    assert [event.kind for event in kept.events] == ["phase", "interval", "checkpoint", "interval"]
    assert kept.events[2].values == {"checkpoint_step": 12}


def test_evaluation_and_end() -> None:
    kept = Kept()
    with Reporter([kept]) as reporter:
        reporter.phase("evaluating")
        reporter.evaluation(9, Quality(auc=0.75, left_out={"ne": "why"}))
        reporter.end({"steps": 9})
    assert kept.told() == [("phase", None), ("evaluation", 9), ("end", 9)]
    assert kept.events[1].values == {"auc": 0.75, "left_out": {"ne": "why"}}


def test_an_error_is_an_event() -> None:
    kept = Kept()
    with pytest.raises(JobError), Reporter([kept]):
        raise JobError("it failed")
    assert kept.events[0].values == {"type": "JobError", "error": "it failed"}
    assert kept.closed == [True]


def test_a_sink_that_fails_is_closed_and_the_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    broken, kept = Kept(fails_at="interval"), Kept()
    with Reporter([broken, kept]) as reporter, reporter.training(facts()) as on_batch:
        assert on_batch is not None
        on_batch(progress)
    assert broken.told() == [("phase", 0)]
    assert broken.closed == [True]
    assert kept.told() == [("phase", 0), ("interval", 3)]
    assert capsys.readouterr().err == "note: Kept ends, training goes on: OSError: no space left\n"


def test_a_rank_without_sinks_is_not_called() -> None:
    with Reporter() as reporter, reporter.training(facts()) as on_batch:
        assert on_batch is None
