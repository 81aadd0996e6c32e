from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bagpipe.checkpoint.dense_state import capture, combine, load, random_state, restore_random_state
from bagpipe.checkpoint.files import check
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.errors import InputError
from bagpipe.testing.recording_streams import RecordingStreams
from bagpipe.training.digest import dense_digest
from tests.checkpoint.samples import captured, model_and_optimizer

CPU = torch.device("cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.dropout(model(torch.rand(5, 3)), 0.5).sum().backward()
        optimizer.step()


def fresh(optimizer_type: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: object):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
    return model, optimizer_type(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_restored_training_continues_bit_for_bit(tmp_path, optimizer_type, options):
    torch.manual_seed(1)
    model, optimizer = fresh(optimizer_type, **options)
    train(model, optimizer, 3)
    state = captured(model, optimizer, rng=random_state(CPU))
    folder = tmp_path / os.fsdecode(b"caf\xe9")  # names of files need not be UTF-8
    folder.mkdir()
    entry = state.save(folder, 0)
    check(folder, entry)
    assert entry.name == "dense-0000.safetensors"
    train(model, optimizer, 3)

    torch.manual_seed(2)
    again, optimizer_again = fresh(optimizer_type, **options)
    loaded = load(folder, entry)
    assert loaded.digest() == state.digest()
    loaded.restore(again, optimizer_again)
    restore_random_state(loaded.rng(), CPU)
    train(again, optimizer_again, 3)
    assert dense_digest(again, optimizer_again) == dense_digest(model, optimizer)


def test_captured_copies_do_not_change():
    model, optimizer = model_and_optimizer()
    state = captured(model, optimizer)
    before = state.digest()
    train(model, optimizer, 1)
    assert state.digest() == before != captured(model, optimizer).digest()


def test_a_file_is_the_same_from_a_device(tmp_path):
    """The device's copies share one memory block."""
    model, optimizer = model_and_optimizer()
    copy = capture(RecordingStreams(), model, optimizer, rng=random_state(CPU))
    expected = captured(model, optimizer, rng=random_state(CPU)).save(tmp_path, 0)
    train(model, optimizer, 1)
    found = copy.get().save(tmp_path, 1)
    assert (found.num_bytes, found.xxh3_128) == (expected.num_bytes, expected.xxh3_128)


def test_names_are_the_models_own(tmp_path):
    model, optimizer = model_and_optimizer()
    path = tmp_path / captured(model, optimizer, rng=random_state(CPU)).save(tmp_path, 3).name
    names = load_file(path).keys()
    assert {name.removeprefix("model.") for name in names if name.startswith("model.")} == model.state_dict().keys()
    assert {"optim.0.weight.exp_avg", "optim.0.weight.step", "model.1.running_mean", "rng.cpu"} <= names


def test_values_that_are_no_tensors_are_kept(tmp_path):
    model, optimizer = model_and_optimizer()
    parameter = next(model.parameters())
    optimizer.state[parameter] |= {"count": 3, "nothing": None, "rate": 0.1, "on": True}
    state = load(tmp_path, captured(model, optimizer).save(tmp_path, 0))
    again, optimizer_again = model_and_optimizer(1)
    state.restore(again, optimizer_again)
    found = optimizer_again.state[next(again.parameters())]
    assert (found["count"], found["nothing"], found["rate"], found["on"]) == (3, None, 0.1, True)
    optimizer.state[parameter]["odd"] = [1]
    with pytest.raises(InputError, match=r"'odd' of '0\.weight' is a list"):
        captured(model, optimizer)


def test_parts_combine_to_the_whole():
    """Stages on two ranks with separate optimizers; the random state is the first rank's."""
    model, _ = model_and_optimizer()
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()])
    first.step()
    second.step()
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    parts = [
        captured(model, optimizer, only=[name for name in names if name.startswith("0.") == mine], rng={"cpu": rng})
        for optimizer, mine, rng in ((first, True, torch.zeros(2)), (second, False, torch.ones(2)))
    ]
    assert not parts[0].tensors.keys() & parts[1].tensors.keys() - {"rng.cpu"}
    whole = combine(parts)
    assert whole.rng()["cpu"].tolist() == [0, 0]
    assert whole.digest() == captured(model, first, second).digest()
    again, whole_optimizer = model_and_optimizer(3)
    whole.restore(again, whole_optimizer)
    assert captured(again, whole_optimizer).digest() == whole.digest()
    assert combine([whole, *parts]).digest() == whole.digest()


def test_the_first_of_several_equal_parts_counts():
    one, two = captured(*model_and_optimizer(0)), captured(*model_and_optimizer(1))
    assert combine([one, two]).digest() == one.digest() != two.digest()


def test_a_tied_parameter_has_every_name():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    state = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {"model.0.weight", "model.1.weight"} <= state.tensors.keys()
    state.restore(model)


class _Stateful(nn.Module):
    def get_extra_state(self) -> object:
        return object()

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(state)


def test_extra_state_is_refused():
    model = nn.Sequential(nn.Linear(1, 1), _Stateful())
    with pytest.raises(InputError, match="module '1' has extra state"):
        captured(model)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "it has '2.bias', this job's model does not"),
        (lambda: nn.Sequential(*model_and_optimizer()[0], nn.Linear(1, 1)), "it has no '3.weight'"),
        (
            lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
            r"'0\.weight' is float32 \[4, 3\] there, float32 \[5, 3\] in this job",
        ),
        (lambda: fresh(torch.optim.SGD, torch.float64)[0], r"'0\.weight' is float32 .* float64"),
    ],
)
def test_another_model_is_refused_and_unchanged(build, said):
    state = captured(*model_and_optimizer())
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = captured(model).digest()
    with pytest.raises(InputError, match=said):
        state.restore(model, optimizer)
    assert captured(model).digest() == before


def test_another_optimizer_is_refused_and_unchanged():
    model, optimizer = fresh(torch.optim.Adagrad)
    before = captured(model, optimizer).digest()
    with pytest.raises(InputError, match=r"state 'step' of '0\.weight' is .* in this job|state 'sum' .* missing there"):
        captured(*model_and_optimizer()).restore(model, optimizer)
    assert captured(model, optimizer).digest() == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0notjson!", (2**40).to_bytes(8, "little")])
def test_other_content_is_broken(tmp_path, content):
    entry = captured(*model_and_optimizer()).save(tmp_path, 0)
    (tmp_path / entry.name).write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        load(tmp_path, entry)
