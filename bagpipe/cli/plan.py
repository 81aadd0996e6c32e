"""`python -m bagpipe plan`: read or measure a model's operators, partition them, print stages, schedule and step time.

--model FILE.json ──OperatorGraph.from_json──┐
--model NAME or MODULE:FUNCTION ──measure────┴──> make_plan ──> table, or JSON

Only measuring a model needs torch. Progress is on standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator

from bagpipe.cli.progress import Progress
from bagpipe.cli.text import aligned, write_text
from bagpipe.cluster.cluster_file import load_cluster
from bagpipe.cluster.network import Network
from bagpipe.config.sections import ModelConfig, RunConfig
from bagpipe.errors import InputError
from bagpipe.partition.cost import Cluster, cluster_of_job
from bagpipe.partition.operators import OperatorGraph
from bagpipe.partition.plan_file import plan_file
from bagpipe.partition.result import Partition, Plan, StagePlan
from bagpipe.partition.splits import ALL_BATCH, SPLITS, is_batch
from bagpipe.types.schema import DataSchema, Feature, Table
from bagpipe.util.documents import file_text
from bagpipe.util.environment import check_environment
from bagpipe.util.sizes import bytes_of

__all__ = ["add_arguments", "run"]

#: Operators of a stage that the table names; the rest is "and n more".
_NAMED_OPERATORS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Choose stages, schedule and micro-batches for a model, and say when one device is faster."
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE|NAME|MODULE:FUNCTION",
        help="a .json operator graph, or a model to trace and measure on this machine",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices; default: all of --cluster")
    parser.add_argument(
        "--cluster",
        metavar="FILE|NAME",
        help="devices, hosts and links: a .toml file, or a preset; default: --devices alike, on hosts of their own",
    )
    parser.add_argument("--planner", default="auto", metavar="NAME", help="auto: the best of all; default: auto")
    parser.add_argument(
        "--recompute", action="store_true", help="stages that do not fit the memory may recompute activations"
    )
    parser.add_argument(
        "--intra-operator",
        action="store_true",
        help="planner alpa also divides linear layers by columns or rows, or replicates operators; not for jobs yet",
    )
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="examples per batch; default: 1024")
    parser.add_argument("--microbatches", type=int, metavar="M", help="per batch; default: powers of two are tried")
    parser.add_argument(
        "--replicas",
        choices=("none", "same", "each"),
        default="same",
        help="none: one device per stage; same: all stages alike; each: any, for --out; default: same",
    )
    parser.add_argument(
        "--mixed-sizes", action="store_true", help="stages may differ in micro-batches (tried on small graphs only)"
    )
    parser.add_argument("--memory", metavar="BYTES", help="of a device, such as 16GiB; default: unlimited")
    parser.add_argument("--link-bandwidth", metavar="BYTES", help="per second and direction; default: unlimited")
    parser.add_argument("--link-latency", metavar="SECONDS", help="device to device; default: 0")
    parser.add_argument(
        "--weight-copies",
        default="3",
        metavar="X",
        help="memory of a parameter with gradient and optimizer state, in multiples of it; default: 3",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save-operators", metavar="FILE", help="write the operator graph, to plan with elsewhere")
    parser.add_argument("--out", metavar="FILE", help="write the plan as TOML, for pipeline.plan of a job")
    parser.add_argument("--save-costs", metavar="FILE", help="write the durations of the stages, for schedule --cost")
    defaults = ModelConfig()
    measured = parser.add_argument_group("models that are measured", "ignored with a .json operator graph")
    measured.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where; default: cpu")
    measured.add_argument(
        "--threads",
        type=int,
        default=RunConfig.threads,
        metavar="N",
        help="compute threads, as run.threads; default: 1",
    )
    measured.add_argument(
        "--roofline",
        metavar="DTYPE",
        help="do not measure: compute the costs from the rates of the cluster's first device, float32 for example",
    )
    measured.add_argument("--columns", default="13,26", metavar="D,S", help="dense and sparse; default: 13,26 (Criteo)")
    measured.add_argument("--embedding-dim", type=int, default=defaults.embedding_dim, metavar="N")
    measured.add_argument("--bottom-mlp", default=_joined(defaults.bottom_mlp), metavar="N,…")
    measured.add_argument("--top-mlp", default=_joined(defaults.top_mlp), metavar="N,…")


def _joined(widths: tuple[int, ...]) -> str:
    return ",".join(map(str, widths))


def run(flags: argparse.Namespace) -> str:
    """The plan as text or JSON.

    Raises:
        InputError: a bad flag, file or graph, or nothing fits the memory.
    """
    from bagpipe.partition.plan import make_plan  # with numpy, which the other commands do without

    cluster = _cluster(flags)
    if flags.batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, got {flags.batch_size}")
    with Progress("plan") as progress:
        graph = _operators(flags, progress)
        if flags.save_operators:
            write_text("--save-operators", flags.save_operators, graph.to_json())
        plan = make_plan(
            graph,
            cluster,
            flags.batch_size,
            planner=flags.planner,
            microbatches=flags.microbatches,
            replicas=flags.replicas,
            mixed_sizes=flags.mixed_sizes,
            recompute=flags.recompute,
            intra_operator=flags.intra_operator,
            on_search=progress.phase("comparing partitions"),
        )
    if flags.out:
        write_text("--out", flags.out, _plan_file(plan.partition, flags.batch_size))
    if flags.save_costs:
        write_text("--save-costs", flags.save_costs, json.dumps(plan.partition.costs(), indent=2) + "\n")
    if flags.json:
        return json.dumps({"batch_size": flags.batch_size, **plan.summary()}, indent=2) + "\n"
    return "\n".join(_table(plan, flags.batch_size)) + "\n"


def _plan_file(partition: Partition, batch_size: int) -> str:
    try:
        return plan_file(partition, batch_size).to_toml()
    except InputError as error:
        raise InputError(f"--out: {error}") from None


def _cluster(flags: argparse.Namespace) -> Cluster:
    """The devices of the job: those of a cluster, or as many as the flags say.

    Raises:
        InputError: a bad flag or file, or flags that contradict each other.
    """
    weight_copies = _number("--weight-copies", flags.weight_copies)
    if flags.cluster is None:
        if flags.devices is None:
            raise InputError("expected --devices or --cluster, got neither")
        return Cluster(
            devices=flags.devices,
            memory_bytes=bytes_of("--memory", flags.memory or "inf"),
            weight_copies=weight_copies,
            network=Network(
                bandwidth_bytes_per_s=bytes_of("--link-bandwidth", flags.link_bandwidth or "inf"),
                latency_s=_number("--link-latency", flags.link_latency or "0"),
            ),
        )
    for flag in ("memory", "link_bandwidth", "link_latency"):
        if getattr(flags, flag) is not None:
            raise InputError(f"--{flag.replace('_', '-')} is not possible with --cluster, which says it")
    return cluster_of_job(load_cluster(flags.cluster), flags.devices, weight_copies=weight_copies)


def _operators(flags: argparse.Namespace, progress: Progress) -> OperatorGraph:
    model: str = flags.model
    if not model.endswith(".json"):
        return _measured(flags, progress)
    return OperatorGraph.from_json(file_text(model, subject="--model"), source=model)


def _measured(flags: argparse.Namespace, progress: Progress) -> OperatorGraph:
    """Build the model, trace it, and measure its operators at typical micro-batch sizes."""
    check_environment()
    with warnings.catch_warnings():  # import warnings of torchrec's dependencies
        warnings.simplefilter("ignore")
        import torch

        from bagpipe.calibration.device import compute_threads
        from bagpipe.models.torchrec_models import build_model, num_dense_inputs
        from bagpipe.pipeline.stage.measure import computed_graph, operator_graph
        from bagpipe.split.split import trace_parts
        from bagpipe.split.trace import quiet

    if flags.roofline is not None and flags.cluster is None:
        raise InputError("--roofline: expected --cluster, whose first device counts, got none")
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: expected a CUDA device for cuda, found none")
    if flags.threads < 1:
        raise InputError(f"--threads: expected at least 1, got {flags.threads}")
    num_dense, num_sparse = _integers("--columns", flags.columns, 2)
    names = [f"C{number}" for number in range(1, num_sparse + 1)]
    schema = DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(1, num_dense + 1)),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )
    bottom_mlp, top_mlp = _integers("--bottom-mlp", flags.bottom_mlp), _integers("--top-mlp", flags.top_mlp)
    widths = {"--embedding-dim": flags.embedding_dim, "--bottom-mlp": min(bottom_mlp), "--top-mlp": min(top_mlp)}
    for flag, width in widths.items():
        if width < 1:
            raise InputError(f"{flag}: expected widths of at least 1, got {width}")
    is_factory = ":" in flags.model
    config = ModelConfig(
        name=ModelConfig.name if is_factory else flags.model,
        factory=flags.model if is_factory else "",
        embedding_dim=flags.embedding_dim,
        bottom_mlp=bottom_mlp,
        top_mlp=top_mlp,
    )
    with quiet():
        with torch.device(flags.device):  # embedding rows stay on the meta device: they belong to the store
            model = build_model(schema, config)
        parts = trace_parts(model, num_dense=num_dense_inputs(schema), dtype=torch.float32)
    batch = flags.batch_size
    sizes = sorted({max(1, batch // 16), max(2, batch // 4), max(3, batch)})
    if flags.roofline is not None:
        cluster = load_cluster(flags.cluster)
        device = cluster.devices[cluster.trainers[0].device]
        return computed_graph(parts, device, dtype=flags.roofline, examples=sizes)
    with compute_threads(flags.threads):
        return operator_graph(parts, examples=sizes, on_measured=progress.phase("measuring the model"))


def _integers(flag: str, text: str, count: int | None = None) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(n.isascii() and n.isdecimal() for n in numbers) or (count is not None and len(numbers) != count):
        expected = "numbers" if count is None else f"{count} numbers"
        raise InputError(f"{flag}: expected {expected} with commas between, got {text!r}")
    return tuple(map(int, numbers))


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{flag}: expected a number of at least 0, got {text!r}")
    return value


def _table(plan: Plan, batch_size: int) -> Iterator[str]:
    best = plan.partition
    is_divided = any(not is_batch(stage.splits) for stage in best.stages)
    columns = ("stage", "feeds", "replicas", "micro", "in flight", "F ms", "B ms", "MB")
    rows = [(*columns, *(("splits",) if is_divided else ()), "operators")]
    for number, stage in enumerate(best.stages):
        more = len(stage.operators) - _NAMED_OPERATORS
        rows.append(
            (
                str(number),
                ",".join(map(str, best.graph.consumers[number])) or "-",
                str(stage.replicas),
                str(stage.microbatches),
                str(stage.in_flight),
                f"{stage.forward_s * 1e3:.4g}",
                f"{stage.backward_s * 1e3:.4g}",
                f"{stage.memory_bytes / 1e6:.4g}",
                *((_splits(stage),) if is_divided else ()),
                ", ".join(stage.operators[:_NAMED_OPERATORS]) + (f" and {more} more" if more > 0 else ""),
            )
        )
    yield from aligned(rows)
    yield ""
    counts = sorted({stage.microbatches for stage in best.stages})
    yield f"schedule          {best.schedule} on {_devices(best)}, micro-batches {', '.join(map(str, counts))}"
    yield f"planner           {best.planner}"
    if any(stage.recompute for stage in best.stages):
        yield f"recompute         {', '.join(f'{stage.recompute:.3g}' for stage in best.stages)} of the micro-batches"
    yield f"step              {best.step_s * 1e3:.4g} ms for {batch_size} examples, bubble {best.bubble:.3g}"
    optimum = (
        ", the least of all partitions" if plan.exact and _same(best.bottleneck_s, plan.least_bottleneck_s) else ""
    )
    yield f"bottleneck        {best.bottleneck_s * 1e6:.4g} us per example{optimum}"
    if not _same(best.bottleneck_s, plan.least_bottleneck_s):
        yield f"least bottleneck  {plan.least_bottleneck_s * 1e6:.4g} us per example, in a longer step"
    if plan.one_device is None:
        yield "one device        does not fit"
    else:
        yield f"one device        {plan.one_device.step_s * 1e3:.4g} ms, {plan.speedup:.3g} times the plan's step"
    for other in plan.alternatives:
        step = f"{other.partition.step_s * 1e3:.4g} ms on {_devices(other.partition)}"
        yield f"{other.name:17} {step}, bottleneck {other.partition.bottleneck_s * 1e6:.4g} us per example"
    if plan.one_device_wins:
        yield "one device wins: no partition has a shorter step"
    elif len(best.stages) == 1:
        yield "data parallelism wins: no pipeline has a shorter step"


def _splits(stage: StagePlan) -> str:
    """Numbers of a stage's operators by split: "2 columns, 2 rows"."""
    counts = Counter(stage.splits or (ALL_BATCH,) * len(stage.operators))
    return ", ".join(f"{counts[name]} {name}" for name in SPLITS if name in counts)


def _devices(partition: Partition) -> str:
    return f"{partition.devices} device{'s' * (partition.devices != 1)}"


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)
