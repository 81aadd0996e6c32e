"""`Tasks`: the labels of a job, by which scores and targets are split into columns.

logits [n] or [n, labels], targets [n] or [n, columns] ──split──> [n, labels], [n, labels], weights [n]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bagpipe.dense.loss import Loss
from bagpipe.types.schema import DataSchema

__all__ = ["Tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The labels of a job.

    Attributes:
        labels: their columns.
        is_weighted: examples have weights.
    """

    labels: tuple[str, ...] = ("label",)
    is_weighted: bool = False

    @classmethod
    def of(cls, schema: DataSchema) -> Tasks:
        """The labels of the data."""
        return cls(labels=schema.labels, is_weighted=bool(schema.example_weight))

    @property
    def loss(self) -> Loss:
        """The loss that evaluations count: binary cross-entropy of the plain labels."""
        return Loss(num_labels=len(self.labels), is_weighted=self.is_weighted)

    def split(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[n, num_labels]``, labels of the same shape, and weights ``[n]``, None if there are none.

        Args:
            logits: ``[n]``, with several labels ``[n, num_labels]``.
            targets: ``[n, *loss.target_shape]``.
        """
        num_labels = len(self.labels)
        columns = targets.reshape(-1, num_labels + self.is_weighted)
        return logits.reshape(-1, num_labels), columns[:, :num_labels], columns[:, -1] if self.is_weighted else None
