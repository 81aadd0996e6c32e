"""Results as Markdown tables, and what must hold as lines that say whether it does. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.settings import PARTS

__all__ = ["checks", "tables"]

_Values = Mapping[str, Any]

#: What must hold.
MAX_STEP_RATIO = 1.10
MIN_COPY_SHARE = 0.60
MIN_SPEED_UP = 3.0

_OURS = "ours, triton"
_TORCH = ("embedding_bag, sparse", "embedding_bag, dense")
_CONTESTANTS = (_OURS, "ours, torch", *_TORCH, "FBGEMM TBE")


def tables(values: _Values) -> str:
    """Everything that was measured."""
    lines = list(_head(values))
    for name in PARTS:
        part = values["parts"].get(name)
        if part is None:
            continue
        if name in _WRITERS and "found" in part:
            lines += ["", *_WRITERS[name](values)]
        lines += ["", *_foot(name, part)]
    lines += ["", *checks(values)]
    return "\n".join(lines).strip() + "\n"


def _head(values: _Values) -> Iterator[str]:
    if values["rehearsed"]:
        yield "**A rehearsal: tiny sizes on the CPU. These are no measurements.**"
        yield ""
    if not _on_gpu(values):
        yield "**No GPU has run this yet.** What stands here was measured on a machine without one."
        yield ""
    for name, text in values["machine"].items():
        yield f"* {name}: {text}"


def _foot(name: str, part: _Values) -> Iterator[str]:
    """The run that measured a part: parts may be of several."""
    run = part["run"]
    if "error" in part:
        yield f"**Part {name} failed: {part['error']}**"
        yield ""
    if "seconds" not in part:
        yield f"**Cut short: part {name} was ended before its end. What is missing here was not measured.**"
        yield ""
    yield (
        f"Part {name}: code {run['code']}, load average {run['load_average']}, copies within the device's memory "
        f"{run['copy_bytes_per_s'] / 1e9:,.0f} GB/s, bytes read and written"
        + "".join(f"; {line}" for line in run["missing"])
        + "."
    )


def _on_gpu(values: _Values) -> bool:
    return bool(values["kind"] == "cuda")


def _found(values: _Values, name: str) -> Any:
    """What a part has found; None: nothing."""
    return values["parts"].get(name, {}).get("found")


def _settings(values: _Values, name: str) -> _Values:
    """Sizes that a part was measured with."""
    settings: _Values = values["parts"][name]["run"]["settings"]
    return settings


def _kernels(values: _Values) -> Iterator[str]:
    rate = values["parts"]["kernels"]["run"]["copy_bytes_per_s"]
    yield "### Rows pooled and updated"
    yield ""
    yield "Microseconds, medians; in brackets the share of the copy rate that the counted bytes make."
    for phase, title in (("forward", "Forward"), ("update", "Backward and update")):
        yield ""
        yield f"**{title}**"
        yield ""
        yield "| optimizer | D | ids | bag | unique | MB | " + " | ".join(_CONTESTANTS) + " |"
        yield "|" + "---|" * (6 + len(_CONTESTANTS))
        for r in _found(values, "kernels"):
            cells = []
            for name in _CONTESTANTS:
                time_s = r[f"{phase}_s"].get(name)
                share = "" if time_s is None else f" ({r[f'{phase}_bytes'] / time_s / rate:.0%})"
                cells.append("-" if time_s is None else f"{time_s * 1e6:,.0f}{share}")
            yield (
                f"| {r['optimizer']} | {r['dim']} | {r['law']} | {r['bag']} | {r['unique']:,} "
                f"| {r[f'{phase}_bytes'] / 1e6:.1f} | " + " | ".join(cells) + " |"
            )


def _steps(values: _Values) -> Iterator[str]:
    part, settings = _found(values, "steps"), _settings(values, "steps")
    floor_s = _floor_s(part)
    yield f"### A step of {settings['batch_size']:,} examples"
    yield ""
    yield (
        f"{part['total_rows']:,} rows of dimension {settings['dim']}, row optimizer {settings['rows_optimizer']}; "
        f"cache {part['cache_rows']:,} rows, lookahead {settings['lookahead']}; {settings['measured_steps']} steps "
        f"after {settings['warmup_steps']}; planned beforehand, at {part['plan_s'] * 1e3:.1f} ms a plan."
    )
    yield ""
    yield "| rows | step p50 ms | / fastest resident | rows fetched | rows written | waited for rows, ms | loss |"
    yield "|---|---|---|---|---|---|---|"
    for name, time_s in part["resident_s"].items():
        again_s = part["resident_again_s"].get(name)
        again = "" if again_s is None else f" (again: {again_s * 1e3:.2f})"
        yield f"| all resident, {name} | {time_s * 1e3:.2f}{again} | {_ratio(time_s, floor_s)} | - | - | - | - |"
    for name, r in part["cached"].items():
        yield (
            f"| cached, {name} | {r['step_p50_s'] * 1e3:.2f} | {_ratio(r['step_p50_s'], floor_s)} "
            f"| {r['rows_fetched']:,.0f} | {r['rows_written']:,.0f} | {r['exposed_s'] * 1e3:.2f} | {r['loss']:.6f} |"
        )
    for name, why in part["missing"].items():
        yield f"| {name} | not measured: {why} | | | | | |"
    yield ""
    for name, r in part["cached"].items():
        if floor_s is not None and r["step_p50_s"] > MAX_STEP_RATIO * floor_s:
            yield (
                f"* {name}: to keep up with {floor_s * 1e3:.2f} ms a step its store would have to give "
                f"{r['rows_fetched'] / floor_s:,.0f} and take {r['rows_written'] / floor_s:,.0f} rows a second."
            )
    yield "* Busy per step: " + "; ".join(
        f"{name}: " + ", ".join(f"{lane} {time_s * 1e3:.2f} ms" for lane, time_s in r["lanes_s"].items())
        for name, r in part["cached"].items()
    )


def _appetite(values: _Values) -> Iterator[str]:
    part, settings = _found(values, "appetite"), _settings(values, "appetite")
    steps = _found(values, "steps")
    is_same_step = steps is not None and _sizes(_settings(values, "steps")) == _sizes(settings)
    floor_s = _floor_s(steps) if is_same_step else None
    yield "### What a device can be fed with"
    yield ""
    yield (
        f"A step of {settings['batch_size']:,} examples in the steady state: {part['rows_unique']:,.0f} unique rows, "
        f"{part['rows_fetched']:,.0f} fetched, {part['rows_evicted']:,.0f} evicted."
    )
    yield ""
    yield "| | steps/s | rows/s | client's CPU time, s per million rows |"
    yield "|---|---|---|---|"
    if floor_s is not None:
        where = "the GPU" if _on_gpu(values) else "this machine's CPU, for comparison"
        yield (
            f"| {where}, all rows resident | {1 / floor_s:,.1f} | {part['rows_fetched'] / floor_s:,.0f} fetched, "
            f"{part['rows_evicted'] / floor_s:,.0f} written | - |"
        )
    yield f"| planner, one thread | {1 / part['plan_s']:,.1f} | - | - |"
    yield f"| preparation of plan and inputs, one thread | {1 / part['prepare_s']:,.1f} | - | - |"
    for name, rates in part["stores"].items():
        both = rates["rows_read_and_written_per_s"]
        yield (
            f"| {name}, one client | {both / max(1.0, part['rows_fetched']):,.1f} | {both:,.0f} read and as many "
            f"written at once; {rates['rows_read_per_s']:,.0f} read alone, "
            f"{rates['rows_written_per_s']:,.0f} written alone | {_client_cpu(rates)} |"
        )
    for name, why in part["missing"].items():
        yield f"| {name} | not measured: {why} | | |"


def _client_cpu(rates: Mapping[str, float]) -> str:
    return (
        f"{rates['cpu_s_per_million_read_and_written']:.2f} read and as many written at once; "
        f"{rates['cpu_s_per_million_read']:.2f} read alone, {rates['cpu_s_per_million_written']:.2f} written alone"
    )


def _floor_s(part: _Values) -> float | None:
    """The fastest step with all rows resident, of either time that it was measured."""
    times_s = [*part["resident_s"].values(), *part["resident_again_s"].values()]
    return min(times_s) if times_s else None


def _ratio(time_s: float, floor_s: float | None) -> str:
    return "-" if floor_s is None else f"{time_s / floor_s:.2f}"


def _sizes(settings: _Values) -> _Values:
    """All but what says which parts to measure."""
    return {name: value for name, value in settings.items() if name != "parts"}


#: Part -> its tables, in the order of the report; `trace` has none.
_WRITERS: Mapping[str, Callable[[_Values], Iterator[str]]] = {
    "kernels": _kernels,
    "steps": _steps,
    "appetite": _appetite,
}


def checks(values: _Values) -> list[str]:
    """What must hold on a GPU, each line with pass, MISS or not measured. On a CPU there is nothing to hold."""
    if not _on_gpu(values):
        return []
    return [*_step_checks(values), *_kernel_checks(values)]


def _step_checks(values: _Values) -> Iterator[str]:
    part = _found(values, "steps") or {"resident_s": {}, "resident_again_s": {}, "cached": {}}
    floor_s = _floor_s(part)
    if floor_s is None or not part["cached"]:
        yield f"* cached step at most {MAX_STEP_RATIO:.2f}x the fastest resident step: not measured"
        return
    for name, record in part["cached"].items():
        ratio = record["step_p50_s"] / floor_s
        yield (
            f"* cached step over {name} at most {MAX_STEP_RATIO:.2f}x the fastest resident step: {ratio:.2f}, "
            f"{_verdict(ratio <= MAX_STEP_RATIO)}"
        )


def _kernel_checks(values: _Values) -> Iterator[str]:
    records = [r for r in _found(values, "kernels") or [] if _OURS in r["update_s"]]
    rate = values["parts"]["kernels"]["run"]["copy_bytes_per_s"] if records else 0.0
    shares, speed_ups, against_fbgemm = [], [], []
    for r in records:
        own_s = r["update_s"][_OURS]
        shares.append(r["update_bytes"] / own_s / rate)
        peers = [r["update_s"][name] for name in _TORCH if name in r["update_s"]]
        if peers:
            speed_ups.append(min(peers) / own_s)
        if "FBGEMM TBE" in r["update_s"]:
            against_fbgemm.append(r["update_s"]["FBGEMM TBE"] / own_s)
    for what, found, least in (
        (f"backward and update at least {MIN_COPY_SHARE:.0%} of the copy rate", shares, MIN_COPY_SHARE),
        (f"at least {MIN_SPEED_UP:.0f}x the faster of torch's embedding_bag paths", speed_ups, MIN_SPEED_UP),
        ("not slower than FBGEMM's TBE", against_fbgemm, 1.0),
    ):
        if not found:
            yield f"* {what}: not measured"
            continue
        held = sum(value >= least for value in found)
        yield (
            f"* {what}: held in {held} of {len(found)} settings (from {min(found):.2f} to {max(found):.2f}), "
            f"{_verdict(held == len(found))}"
        )


def _verdict(holds: bool) -> str:
    return "pass" if holds else "MISS"
