"""One measured job, in a process of its own: evaluations during training, then `trainer eval` and `predict` in turns.

python -m benchmarks.evaluation.trial OUTCOME.json FOLDER NUM_TURNS CONFIG_FLAG …
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagpipe.config.load import parse_config
from bagpipe.training.evaluation import Scoring
from trainer.evaluation import Evaluator
from trainer.job import run_job
from trainer.process import configure_process
from trainer.scoring import evaluate, predict


class Clock:
    """Seconds of calls of a method: wall, and processor time of the process and of the calling thread."""

    def __init__(self, owner: type, name: str) -> None:
        self.calls: list[tuple[float, float, float]] = []
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            starts = time.perf_counter(), time.process_time(), time.thread_time()
            try:
                return method(*args)
            finally:
                ends = time.perf_counter(), time.process_time(), time.thread_time()
                wall, process, thread = (end - start for start, end in zip(starts, ends, strict=True))
                self.calls.append((wall, process, thread))

        setattr(owner, name, timed)


def main() -> None:
    """Measure the job of the command line, and write the outcome."""
    outcome, folder, num_turns, *flags = sys.argv[1:]
    configure_process()
    flags += ["--checkpoint.dir", f"{folder}/checkpoints", "--store.namespace", "trial"]
    forwards = Clock(Scoring, "forward")
    evaluations: list[dict[str, float]] = []
    patched: Any = Evaluator
    evaluate_once = Evaluator.evaluate

    def measured(self: Evaluator, step: int) -> bool:
        forwards.calls.clear()
        wall_s, process_s = time.perf_counter(), time.process_time()
        is_over = evaluate_once(self, step)
        evaluations.append(
            {
                "wall_s": time.perf_counter() - wall_s,
                "processor_s": time.process_time() - process_s,
                "forward_wall_s": sum(call[0] for call in forwards.calls),
                "forward_processor_s": sum(call[2] for call in forwards.calls),
            }
        )
        return is_over

    patched.evaluate = measured
    config = parse_config(flags, "trial", ()).config
    result = run_job(config)
    turns: dict[str, list[float]] = {"eval": [], "predict": []}
    # All examples, with both commands.
    scored = [*flags, "--data.eval_fraction", "0", "--eval.every", "0"]
    for _ in range(int(num_turns)):
        for name, command, more in (
            ("eval", evaluate, []),
            ("predict", predict, ["--out", f"{folder}/scores.parquet"]),
        ):
            start_s = time.perf_counter()
            assert command([*scored, *more]) == 0
            turns[name].append(time.perf_counter() - start_s)
    found = {"evaluations": evaluations, "samples": result.samples, "seconds": result.seconds, "turns": turns}
    Path(outcome).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
