"""What the settings of a job say about its state, by name, as a manifest has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counts_uses", "expires", "follows_rows", "is_staged", "optimizer_name"]


def optimizer_name(settings: Mapping[str, Any]) -> str:
    """Name of a job's dense optimizer, in lower case; empty: not known."""
    return str(settings.get("optim.dense") or settings.get("optimizer") or "").lower()


def is_staged(settings: Mapping[str, Any]) -> bool:
    """As `PipelineConfig.is_staged`."""
    return bool(settings.get("pipeline.schedule", "none") != "none" or settings.get("pipeline.microbatches", 1) > 1)


def follows_rows(settings: Mapping[str, Any]) -> bool:
    """The uses of a job's rows are counted, or followed to let them expire: it needs the names of those there are."""
    return counts_uses(settings) or expires(settings)


def counts_uses(settings: Mapping[str, Any]) -> bool:
    """A table needs more than one use of a row."""
    return settings.get("data.min_uses", 1) > 1 or bool(settings.get("data.min_uses_by_table"))


def expires(settings: Mapping[str, Any]) -> bool:
    """Rows of a table expire."""
    return bool(settings.get("data.expire_after") or settings.get("data.expire_after_by_table"))
