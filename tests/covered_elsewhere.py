"""Modules without a test file of their own name, by what covers them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NO_MIRROR"]

_COVERED_BY: Mapping[str, tuple[str, ...]] = {
    "tests/cache/test_row_cache.py": ("bagpipe/cache/cache_statistics.py",),
    "tests/cache/test_row_exchange.py": (
        "bagpipe/cache/gradient_squares.py",
        "bagpipe/testing/local_peers.py",
    ),
    "tests/cacher/test_hostile_peers.py": (
        "cacher/calls.py",
        "cacher/process.py",
        "cacher/requests.py",
    ),
    "tests/cacher/test_metrics.py": ("cacher/counters.py",),
    "tests/cacher/test_plan_service.py": ("cacher/admission.py",),
    "tests/cacher/test_server.py": ("cacher/cli.py",),
    "tests/checkpoint/test_codec.py": ("bagpipe/checkpoint/manifest.py",),
    "tests/cli/test_schedule.py": ("bagpipe/cli/main.py",),
    "tests/client/rank_batches.py": ("bagpipe/oracle/rank_batch.py",),
    "tests/client/test_remote.py": ("bagpipe/client/receiver.py",),
    "tests/config/test_keys.py": (
        "bagpipe/config/dense_section.py",
        "bagpipe/config/eval_section.py",
        "bagpipe/config/optim_section.py",
        "bagpipe/config/pipeline_section.py",
        "bagpipe/config/sections.py",
    ),
    "tests/config/test_model_rules.py": ("bagpipe/config/model_section.py",),
    "tests/config/test_rules.py": (
        "bagpipe/config/cacher_section.py",
        "bagpipe/config/ranges.py",
    ),
    "tests/data/replay/test_sweep.py": ("data/replay/records.py",),
    "tests/dense/chunks/test_chunked_model.py": ("bagpipe/dense/chunks/gradients.py",),
    "tests/dense/parallel/test_replicated.py": ("bagpipe/dense/parallel/buckets.py",),
    "tests/pipeline/stage/test_cuda_graph.py": ("bagpipe/testing/repeated_calls.py",),
    "tests/dense/test_executor.py": ("bagpipe/types/model_inputs.py",),
    "tests/distributed": ("bagpipe/distributed/interface.py",),
    "tests/distributed/test_links.py": ("bagpipe/testing/local_links.py",),
    "tests/gpu/test_cuda_stream.py": ("bagpipe/pipeline/cuda_stream.py",),
    "tests/jobs/test_session.py": (
        "bagpipe/jobs/job.py",
        "bagpipe/jobs/open_job.py",
    ),
    "tests/kernels": ("bagpipe/kernels/interface.py",),
    "tests/kernels/test_triton_kernels.py": (
        "bagpipe/kernels/triton_rows.py",
        "bagpipe/kernels/triton_sums.py",
    ),
    "tests/lookahead/test_inline.py": ("bagpipe/lookahead/interface.py",),
    "tests/lookahead/test_link.py": ("bagpipe/util/shared_file.py",),
    "tests/lookahead/test_planning.py": ("bagpipe/oracle/capacity.py",),
    "tests/partition/test_planners.py": (
        "bagpipe/partition/candidates.py",
        "bagpipe/partition/planner.py",
    ),
    "tests/pipeline/stage/test_dense_pipeline.py": ("bagpipe/pipeline/stage/mesh.py",),
    "tests/pipeline/test_stream.py": (
        "bagpipe/pipeline/devices.py",
        "bagpipe/testing/recording_streams.py",
    ),
    "tests/schedule/lowering/test_step_program.py": ("bagpipe/schedule/ir/step_program.py",),
    "tests/start_from/test_tables.py": ("bagpipe/start_from/source.py",),
    "tests/start_from/test_tensor_source.py": ("bagpipe/start_from/safetensor_files.py",),
    "tests/store": ("bagpipe/store/interface.py",),
    "tests/store/memory/test_store.py": ("bagpipe/store/memory/table.py",),
    "tests/store/process/test_store.py": ("bagpipe/store/process/child.py", "bagpipe/store/process/parent.py"),
    "tests/store/redis/test_ledger.py": ("bagpipe/store/redis/ledger_scripts.py",),
    "tests/store/test_conformance.py": (
        "bagpipe/store/memory/ledger.py",
        "bagpipe/testing/delete_conformance.py",
        "bagpipe/testing/fence_conformance.py",
        "bagpipe/testing/fence_jobs.py",
        "bagpipe/testing/namespace_conformance.py",
        "bagpipe/testing/store_conformance.py",
    ),
    "tests/store/test_slow_store.py": ("bagpipe/testing/slow_store.py",),
    "tests/system": ("trainer/assembly.py",),
    "tests/system/test_chunked_stages.py": (
        "bagpipe/pipeline/stage/chunk_lane.py",
        "bagpipe/pipeline/stage/chunked_stages.py",
        "bagpipe/pipeline/stage/chunked_versions.py",
    ),
    "tests/system/test_dense_part.py": ("bagpipe/training/whole_dense.py",),
    "tests/system/test_engine_phases.py": (
        "bagpipe/training/reading.py",
        "bagpipe/training/rows.py",
        "bagpipe/training/totals.py",
    ),
    "tests/system/test_evaluation.py": (
        "bagpipe/jobs/evaluation.py",
        "trainer/evaluation.py",
    ),
    "tests/system/test_guard.py": ("bagpipe/training/nonfinite.py",),
    "tests/system/test_no_sync.py": ("bagpipe/training/evaluation.py",),
    "tests/system/test_pipelined.py": (
        "bagpipe/training/stage_layers.py",
        "bagpipe/training/stage_losses.py",
        "bagpipe/training/staged_dense.py",
    ),
    "tests/system/test_rank_threads.py": ("bagpipe/training/row_exchange.py",),
    "tests/system/test_ranks.py": ("trainer/open_job.py",),
    "tests/system/test_recorder.py": (
        "bagpipe/checkpoint/recorded.py",
        "bagpipe/checkpoint/recorder.py",
        "bagpipe/training/checkpointing.py",
    ),
    "tests/system/test_resume_ranks.py": ("bagpipe/training/earlier_rows.py",),
    "tests/system/test_row_optimizers.py": ("bagpipe/training/row_decay.py",),
    "tests/system/test_rows.py": (
        "trainer/row_ages.py",
        "trainer/row_report.py",
    ),
    "tests/system/test_scoring.py": (
        "bagpipe/checkpoint/checkpoint_store.py",
        "trainer/score_file.py",
        "trainer/scoring.py",
    ),
    "tests/system/test_sharded_stages.py": ("bagpipe/pipeline/stage/stage_weights.py",),
    "tests/tools/test_make_protos.py": (
        "bagpipe/client/cacher_pb2.py",
        "bagpipe/client/cacher_pb2_grpc.py",
    ),
    "tests/train_pipeline/test_accumulation.py": ("bagpipe/training/micro_lookups.py",),
    "tests/train_pipeline/test_loading.py": ("bagpipe/train_pipeline/initial_rows.py",),
    "tests/train_pipeline/test_pipeline.py": (
        "bagpipe/train_pipeline/evaluation.py",
        "bagpipe/train_pipeline/open_pipeline.py",
        "bagpipe/train_pipeline/session.py",
        "bagpipe/train_pipeline/user_batches.py",
    ),
    "tests/train_pipeline/test_saving.py": ("bagpipe/train_pipeline/saved_state.py",),
    "tests/trainer/observe/test_lines.py": ("trainer/observe/events.py",),
    "tests/trainer/observe/test_meter.py": ("bagpipe/training/progress.py",),
    "tests/trainer/test_export.py": ("trainer/export_source.py",),
    "tests/training/test_weights.py": ("bagpipe/training/chunked_weights.py",),
    "tests/util/test_program.py": ("bagpipe/errors.py",),
}

#: Module -> the test file or folder that covers it.
NO_MIRROR: Mapping[str, str] = {module: test for test, modules in _COVERED_BY.items() for module in modules}
