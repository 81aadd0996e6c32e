"""One run of FuxiCTR, in the interpreter that has it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bagpipe.errors import InputError
from benchmarks.bars.settings import BATCH_SIZE, CLIP_NORM, MODELS, OPTIMIZERS, PATIENCE, Outcome, Run
from benchmarks.harness.child import run_child

__all__ = ["Fuxictr"]

_TRIAL = Path(__file__).with_name("fuxictr_trial.py")
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuxictr:
    """FuxiCTR on this machine.

    Attributes:
        python: interpreter with the packages fuxictr and torch.
        zoo: checkout of FuxiCTR, for its model_zoo, which the package lacks.
        data: folder of `prepare`.
    """

    python: Path
    zoo: Path
    data: Path

    def check(self) -> str:
        """Versions of FuxiCTR and its torch. InputError: it cannot run."""
        if not (self.zoo / "model_zoo" / "DCNv2").is_dir():
            raise InputError(f"--zoo must be a checkout of github.com/reczoo/FuxiCTR, got {self.zoo}")
        program = "import importlib.metadata as m, torch; print(m.version('fuxictr') + ', torch', torch.__version__)"
        try:
            done = subprocess.run([str(self.python), "-c", program], capture_output=True, text=True, check=False)
        except OSError as error:
            raise InputError(f"--fuxictr must be a Python interpreter: {error}") from None
        if done.returncode:
            raise InputError(f"--fuxictr {self.python} has no fuxictr or no torch: {done.stderr.strip()[-200:]}")
        return done.stdout.strip()

    def measure(self, run: Run, steps_per_epoch: int, start: Path | None = None) -> Outcome:
        """Train and score.

        Args:
            run: what to train.
            steps_per_epoch: batches of an epoch.
            start: folder of `same_start`, with initial values and batches; None: FuxiCTR's own.
        """
        optimizer = OPTIMIZERS[run.optimizer]
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "model": MODELS[run.model].fuxictr,
                "arguments": run.fuxictr_arguments,
                "seed": run.seed,
                "optimizer": optimizer.fuxictr,
                "learning_rate": optimizer.rate,
                "sparse_adam": {"lazy": "batch", "sparse-adam": "all"}.get(run.system, ""),
                "batch_size": BATCH_SIZE,
                "epochs": run.epochs,
                "patience": PATIENCE,
                "plateau": True,
                "clip_norm": CLIP_NORM,
                "threads": 1,
                "initial": "" if start is None else str(start / "initial.npz"),
                "batches": "" if start is None else str(start / "batches.npz"),
                "steps_per_epoch": steps_per_epoch,
                "zoo": str(self.zoo),
                "data": str(self.data / "fuxictr"),
                "work": folder,
            }
            task_file, outcome_file = Path(folder) / "task.json", Path(folder) / "outcome.json"
            task_file.write_text(json.dumps(task), encoding="utf-8")
            command = [str(self.python), "-P", str(_TRIAL), str(task_file), str(outcome_file)]
            return Outcome(**run_child(command, outcome_file, name="FuxiCTR", timeout_s=_TIMEOUT_S))
