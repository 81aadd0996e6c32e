"""`Case`: one job that is forecast and run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job of one rank on synthetic click logs.

    Attributes:
        model: name of a zoo model.
        top_mlp: widths of its top layers.
        batch_examples: of a batch.
        cache_rows: 0: direct mode.
        rate: of the link to the store, as `tc` writes it.
    """

    model: str
    top_mlp: str
    batch_examples: int
    cache_rows: int
    rate: str

    @property
    def name(self) -> str:
        """For tables."""
        cache = f"cache {self.cache_rows:,}" if self.cache_rows else "direct"
        return f"{self.model} {self.top_mlp}, batch {self.batch_examples}, {cache}, {self.rate}"

    @property
    def bytes_per_s(self) -> float:
        """Of the link; 5 % are headers."""
        number, unit = self.rate[:-4], self.rate[-4:]
        return 0.95 / 8 * float(number) * {"mbit": 1e6, "gbit": 1e9}[unit]


#: Models x caches x links.
CASES = tuple(
    Case(model=model, top_mlp=top_mlp, batch_examples=batch, cache_rows=rows, rate=rate)
    for model, top_mlp, batch in (("dlrm", "64,32", 1024), ("dlrm", "512,256", 1024), ("deepfm", "256,128", 2048))
    for rows in (60_000, 0)
    for rate in ("100mbit", "1gbit", "10gbit")
)
