"""Tables of the time of a step, and of the bytes and operations of K-FAC, measured and by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

from bagpipe.dense.precondition.costs import LayerShape, kept_bytes, sent_bytes
from benchmarks.harness.report import table
from benchmarks.harness.rounds import Spread, paired_ratios
from benchmarks.second_order.contestants import ADAGRAD

__all__ = ["cost_tables", "step_tables"]

Record: TypeAlias = Mapping[str, Any]
Records: TypeAlias = Sequence[Record]

#: Ratios of D-KFAC to DP-KFAC in the latter's abstract, on 64 GPUs: least and most.
PAPER = {"computation": (1.55, 1.65), "traffic": (2.79, 3.15), "memory": (1.14, 1.47)}


def step_tables(records: Records) -> str:
    """Time of a step by model and ranks, and the bytes of K-FAC beside the formulas."""
    groups: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for record in records:
        job = record["job"]
        groups.setdefault((job["model"], job["ranks"]), {}).setdefault(_name(job), []).append(record)
    rows = []
    for (model, ranks), of_name in groups.items():
        base = of_name[ADAGRAD]
        for name, own in of_name.items():
            processor, wall = (
                paired_ratios([each[key] for each in own], [each[key] for each in base[: len(own)]])
                for key in ("processor_s", "step_s_p50")
            )
            rows.append(
                (
                    model,
                    ranks,
                    name,
                    len(own),
                    f"{median(each['processor_s'] for each in own) * 1e3:.1f}",
                    _spread(processor),
                    f"{median(each['step_s_p50'] for each in own) * 1e3:.1f}",
                    _spread(wall),
                )
            )
    title = f"### Time of a step, batches of {records[0]['batch_size']:,}; medians, least to most\n\n"
    headers = (
        "model", "ranks", "optimizer", "rounds", "processor ms, all ranks", "times Adagrad's", "step p50 ms",
        "times Adagrad's",
    )  # fmt: skip
    return f"{title}{table(headers, rows)}\n{_checked(records)}"


def _spread(ratios: Spread) -> str:
    return f"{ratios.median:.2f}" + (
        f" ({ratios.least:.2f} to {ratios.most:.2f})" if ratios.least < ratios.most else ""
    )


def _name(job: Record) -> str:
    if not job["factors"]:
        return str(job["optimizer"])
    factors = f", {job['factors']}" if job["ranks"] > 1 else ""
    return f"kfac {job['factor_every']}/{job['inverse_every']}{factors}"


def _checked(records: Records) -> str:
    """Bytes that jobs on two ranks have sent and kept, beside the formulas."""
    rows = []
    for record in records:
        job, found = record["job"], record["kfac"]
        if record["round"] or not found or job["ranks"] == 1:
            continue
        layers = [LayerShape(num_inputs=a, num_outputs=g) for a, g in found["layers"]]
        sent = sent_bytes(layers, job["factors"], num_ranks=job["ranks"], factor_every=job["factor_every"])
        kept = [kept_bytes(layers, job["factors"], num_ranks=job["ranks"], rank=rank) for rank in range(job["ranks"])]
        rows.append(
            (
                job["model"],
                _name(job),
                f"{found['sent_bytes']:,.0f}",
                f"{sent:,.0f}",
                f"{found['sent_bytes'] / sent - 1:.2%}",
                ", ".join(f"{each:,}" for each in found["kept_bytes"]),
                "the same" if kept == found["kept_bytes"] else ", ".join(f"{each:,}" for each in kept),
            )
        )
    headers = (
        "model", "K-FAC", "bytes sent a step, measured", "by formula", "more", "bytes kept by each rank", "by formula",
    )  # fmt: skip
    return "### Bytes of K-FAC on two ranks: measured, and by formula\n\n" + table(headers, rows)


def cost_tables(found: Mapping[str, Records]) -> str:
    """Bytes and operations by formula."""
    by_key = {(each["model"], each["ranks"], each["division"]): each for each in found["bytes"]}
    rows = []
    for model, ranks in dict.fromkeys(key[:2] for key in by_key):
        local, summed, distributed = (by_key[model, ranks, division] for division in ("local", "summed", "d-kfac"))
        rows.append(
            (
                model,
                ranks,
                *(f"{each['kept'] / 1e6:.2f}" for each in (local, summed, distributed)),
                f"{distributed['kept'] / local['kept']:.2f}",
                *(f"{each['sent 1/10'] / (ranks - 1) / 1e6:.2f}" for each in (local, summed, distributed)),
                *(f"{distributed[f'sent {each}'] / local[f'sent {each}']:.2f}" for each in ("1/1", "1/10", "10/100")),
                f"{_with_gradients(distributed) / _with_gradients(local):.2f}",
            )
        )
    headers = (
        "layers", "ranks", "MB kept: local", "summed", "d-kfac", "d-kfac / local", "MB sent a step and rank: local",
        "summed", "d-kfac", "d-kfac / local, 1/1", "1/10", "10/100", "1/10 with gradients",
    )  # fmt: skip
    text = "### Factors and inverses on the fullest rank, and traffic: by formula\n\n" + table(headers, rows)
    least = ", ".join(f"{what} {low} to {high}" for what, (low, high) in PAPER.items())
    text += f"\nThe paper, D-KFAC / DP-KFAC, on 64 GPUs: {least}.\n"
    return f"{text}\n{_computation(found['computation'])}\n{_operations(found['operations'])}"


def _computation(records: Records) -> str:
    by_key = {(each["model"], each["ranks"], each["division"]): each for each in records}
    rows = []
    for model, ranks in dict.fromkeys(key[:2] for key in by_key):
        local, summed, distributed = (by_key[model, ranks, division] for division in ("local", "summed", "d-kfac"))
        ratios = [
            f"{other[period] / local[period]:.2f}"
            for other in (summed, distributed)
            for period in ("1/1", "1/10", "10/100")
        ]
        rows.append((model, ranks, local["examples"], f"{local['1/10'] / 1e9:.2f}", *ratios))
    headers = (
        "layers", "ranks", "examples of a rank", "G operations, local 1/10", "summed / local, 1/1", "1/10", "10/100",
        "d-kfac / local, 1/1", "1/10", "10/100",
    )  # fmt: skip
    return "### Operations of a step on the rank with most of them, F and B included: by formula\n\n" + table(
        headers, rows
    )


def _with_gradients(record: Record) -> float:
    return float(record["sent 1/10"] + record["gradients"])


def _operations(records: Records) -> str:
    rows = []
    for each in records:
        pure = each["F"] + each["B"]
        shares = {
            "factors": (each["COV_A"] + each["COV_G"]) / pure,
            "inverses": each["X_INV"] / pure,
            "gradients": each["PRECOND"] / pure,
        }
        totals = [
            1 + shares["factors"] / factor + shares["inverses"] / inverse + shares["gradients"]
            for factor, inverse in ((1, 1), (1, 10), (10, 100))
        ]
        rows.append(
            (
                each["model"],
                f"{each['examples']:,}",
                f"{pure / 1e9:.2f}",
                *(f"{share:.2f}" for share in shares.values()),
                *(f"{total:.2f}" for total in totals),
            )
        )
    headers = (
        "model", "examples of a batch", "G operations of F and B", "factors / those", "inverses / those",
        "preconditioning / those", "step with K-FAC 1/1", "1/10", "10/100",
    )  # fmt: skip
    return "### Operations of the dense part on one rank, by formula\n\n" + table(headers, rows)
