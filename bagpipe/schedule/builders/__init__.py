"""The dense schedules, a file for each family. A new file that registers a builder is found by itself.

this folder's modules ──import, each registers its builders──> DENSE_SCHEDULES: name -> DenseSchedule
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from bagpipe.schedule.registry import DenseSchedule, registered

__all__ = ["DENSE_SCHEDULES"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

DENSE_SCHEDULES: Mapping[str, DenseSchedule] = registered()
