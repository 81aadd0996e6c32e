"""The table of planners: name -> search. A new planner is a function of a `Problem`, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping

from bagpipe.partition.alpa import alpa
from bagpipe.partition.pipedream import pipedream
from bagpipe.partition.piper import piper
from bagpipe.partition.planner import Planner
from bagpipe.partition.search import graphpipe

__all__ = ["PLANNERS"]

PLANNERS: Mapping[str, Planner] = {
    "graphpipe": graphpipe,
    "pipedream": pipedream,
    "alpa": alpa,
    "piper": piper,
}
