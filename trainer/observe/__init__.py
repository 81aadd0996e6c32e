"""Reports of a running job, on rank 0.

job ──phase, on_batch, evaluation, end──> reporter.Reporter ──Event, at each sink's pace──> sinks
                                             └── meter: Progress ──> rates; waits: what the computation waited for
sinks   bar (terminal)   lines (text or JSON on stdout, run.log)   trackers (TensorBoard, W&B, MLflow)
        exporter (Prometheus; every rank), its HTTP server: health
sinks.open_reporter makes the reporter of a configuration; events: the records.
"""
