"""Flag --data.path of benchmarks on Criteo's click logs, and the note that names the file beside the results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SAMPLE_VARIABLE", "add_data_path", "data_notes", "data_or_synthetic_notes"]

#: Environment variable with the path of the real sample.
SAMPLE_VARIABLE = "BAGPIPE_CRITEO_SAMPLE"


def add_data_path(parser: argparse.ArgumentParser) -> None:
    """Add the flag, as `path`; its default is that of `SAMPLE_VARIABLE`, or empty."""
    sample = os.environ.get(SAMPLE_VARIABLE, "")
    parser.add_argument("--data.path", dest="path", default=sample, metavar="FILE", help="Criteo's click logs")


def data_notes(options: argparse.Namespace) -> Mapping[str, Any]:
    """`Benchmark.facts` with the name of the file, if there is one."""
    return {"notes": [f"data {Path(options.path).name}"] if options.path else []}


def data_or_synthetic_notes(options: argparse.Namespace) -> Mapping[str, Any]:
    """`Benchmark.facts` with the name of the file, or the number of synthetic examples that replace it."""
    return data_notes(options) if options.path else {"notes": [f"data synthetic, {options.examples:,} examples"]}
