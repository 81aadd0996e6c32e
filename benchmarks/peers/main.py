"""How fast is training from a remote store beside other ways to train the same model on the same batches?

    python -m benchmarks.peers.main [--data.path FILE] [--settings criteo,wide] [--repeats 4] [--out DIR]
    python -m benchmarks.peers.main --report [--out DIR]        tables and plot again, from results.json

Needs root, `ip` and `tc`. The data is a file of Criteo's click logs: --data.path, or $BAGPIPE_CRITEO_SAMPLE; without
either, synthetic data of the same size and skew. Exit codes: 0 done; 2 cannot run here (one line says why); 1 failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bagpipe.errors import InputError, JobError
from bagpipe.util.environment import check_environment
from bagpipe.util.machine import processor_name
from benchmarks.overlap.link import check_privileges, server_version
from benchmarks.peers.contest import line_of, run_contest
from benchmarks.peers.report import outcomes_from_json, to_json, write
from benchmarks.peers.setting import SETTINGS
from benchmarks.peers.task import CONTENDERS, Outcome

__all__ = ["main"]

#: Examples of the real sample, and so of its synthetic stand-in.
_SAMPLE_EXAMPLES = 80_000
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "redis", "hiredis")


def main() -> int:
    """Measure and report."""
    options = _parse()
    try:
        if options.report:
            outcomes, surroundings = _read(options.out)
        else:
            check_environment()
            check_privileges()
            surroundings = _surroundings(options.path)
            print("\n".join(f"{name}: {value}" for name, value in surroundings.items()), flush=True)
            outcomes = _measure(options, surroundings)
    except InputError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print("\n" + write(options.out, outcomes, surroundings))
    return 0


def _measure(options: argparse.Namespace, surroundings: dict[str, str]) -> list[Outcome]:
    for key, names, known in (
        ("--settings", options.settings, SETTINGS),
        ("--contenders", options.contenders, CONTENDERS),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(f"{key}: expected names among {', '.join(known)}, got {unknown[0]!r}")
    if options.path and not Path(options.path).is_file():
        raise InputError(f"--data.path: {options.path} does not exist")
    data = (
        {"path": str(Path(options.path).resolve()), "format": "criteo-tsv"}
        if options.path
        else {"format": "synthetic", "limit": _SAMPLE_EXAMPLES}
    )
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[Outcome] = []

    def told(outcome: Outcome) -> None:
        print(line_of(outcome), flush=True)
        found.append(outcome)
        # After each one: an interrupted run leaves what it has measured.
        (options.out / "results.json").write_text(json.dumps(to_json(found, surroundings)) + "\n")

    return run_contest(
        options.settings,
        options.contenders,
        data,
        repeats=options.repeats,
        tries=options.tries,
        told=told,
    )


def _read(folder: Path) -> tuple[list[Outcome], dict[str, str]]:
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"--report: {path} does not exist, measure first")
    value = json.loads(path.read_text())
    return outcomes_from_json(value), value["surroundings"]


def _parse() -> argparse.Namespace:
    def names(text: str) -> Sequence[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data.path", dest="path", default=os.environ.get("BAGPIPE_CRITEO_SAMPLE", ""), metavar="FILE")
    parser.add_argument("--settings", type=names, default=list(SETTINGS))
    parser.add_argument("--contenders", type=names, default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=4, help="runs of each contender, interleaved")
    parser.add_argument("--tries", type=int, default=3, help="times a run is made until other jobs leave it alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="measure nothing: write --out's results.json up again")
    return parser.parse_args()


def _surroundings(path: str) -> dict[str, str]:
    return {
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)]
        ),
        "server": server_version(),
        "data": Path(path).name if path else f"synthetic, {_SAMPLE_EXAMPLES:,} examples",
    }


if __name__ == "__main__":
    sys.exit(main())
