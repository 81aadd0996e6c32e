"""`Case`: one job that is forecast and run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "Case"]

_UNITS = {"mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job on synthetic click logs.

    Attributes:
        model: name of a zoo model.
        top_mlp: widths of its top layers.
        batch_examples: of a global batch.
        cache_rows: of all ranks; 0: direct mode.
        rate: of the link to the store, as `tc` writes it.
        ranks: processes.
        schedule, stages, microbatches: of the dense part; one stage: it is trained whole.
    """

    model: str
    top_mlp: str
    batch_examples: int
    cache_rows: int
    rate: str
    ranks: int = 1
    schedule: str = "none"
    stages: int = 1
    microbatches: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        words = [f"{self.model} {self.top_mlp}", f"batch {self.batch_examples}"]
        words += [f"cache {self.cache_rows:,}" if self.cache_rows else "direct", self.rate]
        if self.ranks > 1:
            words.append(f"{self.ranks} ranks")
        if self.stages > 1:
            words.append(f"{self.stages} stages, {self.schedule}, {self.microbatches} micro-batches")
        return ", ".join(words)

    @property
    def bytes_per_s(self) -> float:
        """Of the link; 5 % are headers."""
        return 0.95 / 8 * float(self.rate[:-4]) * _UNITS[self.rate[-4:]]


def _case(model: tuple[str, str, int], cache_rows: int, rate: str, ranks: int = 1, pipeline: str = "") -> Case:
    name, top_mlp, batch_examples = model
    schedule, stages, microbatches = pipeline.split() if pipeline else ("none", "1", "1")
    return Case(
        model=name,
        top_mlp=top_mlp,
        batch_examples=batch_examples,
        cache_rows=cache_rows,
        rate=rate,
        ranks=ranks,
        schedule=schedule,
        stages=int(stages),
        microbatches=int(microbatches),
    )


_SMALL, _LARGE, _DEEPFM = ("dlrm", "64,32", 1024), ("dlrm", "512,256", 1024), ("deepfm", "256,128", 2048)
_CACHE, _DEEPFM_CACHE = 60_000, 100_000

#: Models x caches x links x ranks, with stages and without: 20 of them.
CASES = (
    _case(_SMALL, _CACHE, "100mbit"),
    _case(_SMALL, _CACHE, "1gbit"),
    _case(_SMALL, _CACHE, "10gbit"),
    _case(_SMALL, 0, "100mbit"),
    _case(_SMALL, 0, "1gbit"),
    _case(_SMALL, 0, "10gbit"),
    _case(_LARGE, _CACHE, "100mbit"),
    _case(_LARGE, _CACHE, "10gbit"),
    _case(_LARGE, 0, "1gbit"),
    _case(_DEEPFM, _DEEPFM_CACHE, "1gbit"),
    _case(_DEEPFM, 0, "1gbit"),
    _case(_SMALL, _CACHE, "10gbit", 2),
    _case(_LARGE, _CACHE, "1gbit", 2),
    _case(_LARGE, 0, "100mbit", 2),
    _case(_DEEPFM, _DEEPFM_CACHE, "10gbit", 2),
    _case(_LARGE, _CACHE, "10gbit", 2, "gpipe 2 4"),
    _case(_LARGE, _CACHE, "1gbit", 2, "1f1b 2 8"),
    _case(_DEEPFM, _DEEPFM_CACHE, "10gbit", 2, "1f1b 2 4"),
    _case(_LARGE, _CACHE, "10gbit", 4),
    _case(_DEEPFM, 0, "1gbit", 4),
)
