"""Part `kernels`: forward, and backward with update, of all contestants, by row width, id distribution and bag size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.kernel_batch import LAWS, draw_ids, make_batch
from benchmarks.gpu.kernel_contestants import Backward, Forward, open_contestants
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import interleaved

__all__ = ["run_kernels"]


def run_kernels(settings: Settings, say: Callable[[str], None], keep: Callable[[Any], None]) -> None:
    """Measure every setting; `keep` gets the records so far."""
    device = torch.device(settings.device)
    records: list[dict[str, Any]] = []
    told: set[str] = set()
    ids = {
        law: draw_ids(law, rows=settings.kernel_rows, count=settings.kernel_ids, exponent=settings.kernel_zipf)
        for law in LAWS
    }

    def say_once(line: str) -> None:
        if line not in told:
            told.add(line)
            say(line)

    for optimizer in settings.kernel_optimizers:
        for dim in settings.kernel_dims:
            for law in LAWS:
                for bag in dict.fromkeys((1, settings.kernel_bag)):
                    record = _measure(settings, ids[law], bag, dim, optimizer, device, say_once)
                    records.append({"optimizer": optimizer, "dim": dim, "law": law, "bag": bag, **record})
                    say(_line(records[-1]))
            keep(records)


def _measure(
    settings: Settings, ids: Any, bag: int, dim: int, optimizer: str, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    batch = make_batch(ids, bag=bag, rows=settings.kernel_rows, dim=dim, optimizer=optimizer, device=device)
    contestants = open_contestants(batch, device, say)
    forward = interleaved(
        {name: Forward(rows) for name, rows in contestants.items()}, device, repeats=settings.kernel_repeats
    )
    update = interleaved(
        {name: Backward(rows) for name, rows in contestants.items()}, device, repeats=settings.kernel_repeats
    )
    return {
        "ids": len(batch.ids),
        "unique": batch.num_unique,
        "forward_bytes": batch.bytes.forward,
        "update_bytes": batch.bytes.update,
        "forward_s": forward,
        "update_s": update,
    }


def _line(record: dict[str, Any]) -> str:
    times = ", ".join(
        f"{name} {record['forward_s'][name] * 1e6:.0f} + {record['update_s'][name] * 1e6:.0f}"
        for name in record["update_s"]
    )
    return f"kernels {record['optimizer']} D={record['dim']} {record['law']} bag {record['bag']}: {times} us"
