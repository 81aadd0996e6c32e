from __future__ import annotations

import threading

import torch

from bagpipe.dense.seeding import mix_seed, seeded

CPU = torch.device("cpu")


def test_every_number_changes_the_seed() -> None:
    seeds = {mix_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert mix_seed(1, 2) == mix_seed(1, 2)


def test_numbers_are_those_of_the_seed_and_the_generator_goes_on() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    first = torch.rand(2)
    with seeded(9, CPU):
        inside = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    with seeded(9, CPU):
        assert torch.equal(torch.rand(3), inside)


def test_threads_do_not_draw_from_each_other() -> None:
    def draw(seed: int, into: list[torch.Tensor]) -> None:
        for _ in range(50):
            with seeded(seed, CPU):
                into.append(torch.cat([torch.rand(1), torch.rand(1)]))

    drawn: list[list[torch.Tensor]] = [[], []]
    threads = [threading.Thread(target=draw, args=(seed, drawn[seed])) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in drawn:
        assert all(torch.equal(one, own[0]) for one in own)
    assert not torch.equal(drawn[0][0], drawn[1][0])
