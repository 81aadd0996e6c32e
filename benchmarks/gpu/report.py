"""Results as Markdown tables, and the checks of what must hold on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from benchmarks.gpu.settings import PARTS
from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.report import table

__all__ = ["checks", "tables"]

#: Limits of the checks.
MAX_STEP_RATIO = 1.10
MIN_COPY_SHARE = 0.60
MIN_SPEED_UP = 3.0

_OURS = "ours, triton"
_TORCH = ("embedding_bag, sparse", "embedding_bag, dense")
_CONTESTANTS = (_OURS, "ours, torch", *_TORCH, "FBGEMM TBE")


def tables(values: Values) -> str:
    """All parts in their order, then the checks."""
    parts = [
        "\n".join(_WRITERS[name](values)) for name in PARTS if name in _WRITERS and found_of(values, name) is not None
    ]
    if not _on_gpu(values):
        parts.insert(0, "**No GPU has run this yet.** These figures were measured on a machine without one.\n")
    return "\n".join([*parts, "\n".join(checks(values))]).strip() + "\n"


def _on_gpu(values: Values) -> bool:
    return bool(values["machine"]["device type"] == "cuda")


def _settings(values: Values, name: str) -> Values:
    """Settings of the run that measured a part."""
    settings: Values = values["parts"][name]["run"]["settings"]
    return settings


def _kernels(values: Values) -> Iterator[str]:
    rate = values["parts"]["kernels"]["run"]["copy_bytes_per_s"]
    yield "### Rows pooled and updated\n"
    yield "Microseconds, medians; in brackets the share of the copy rate that the counted bytes make.\n"
    for phase, title in (("forward", "Forward"), ("update", "Backward and update")):
        yield f"**{title}**\n"
        rows = [_kernel_row(record, phase, rate) for record in found_of(values, "kernels")]
        yield table(("optimizer", "D", "ids", "bag", "unique", "MB", *_CONTESTANTS), rows)


def _kernel_row(record: Values, phase: str, rate: float) -> tuple[object, ...]:
    counted, times_s = record[f"{phase}_bytes"], record[f"{phase}_s"]
    cells = (
        f"{time_s * 1e6:,.0f} ({counted / time_s / rate:.0%})" if (time_s := times_s.get(name)) is not None else "-"
        for name in _CONTESTANTS
    )
    names = (record[name] for name in ("optimizer", "dim", "law", "bag"))
    return (*names, f"{record['unique']:,}", f"{counted / 1e6:.1f}", *cells)


def _steps(values: Values) -> Iterator[str]:
    part, settings = found_of(values, "steps"), _settings(values, "steps")
    floor_s = _floor_s(part)
    yield f"### A step of {settings['batch_size']:,} examples\n"
    yield (
        f"{part['total_rows']:,} rows of dimension {settings['dim']}, row optimizer {settings['rows_optimizer']}; "
        f"cache {part['cache_rows']:,} rows, lookahead {settings['lookahead']}; {settings['measured_steps']} steps "
        f"after {settings['warmup_steps']}; planned in advance, at {part['plan_s'] * 1e3:.1f} ms a plan.\n"
    )
    headers = ("rows", "step p50 ms", "/ fastest resident", "rows fetched", "rows written", "waited for rows, ms")
    yield table((*headers, "loss"), _step_rows(part, floor_s))
    for name, r in part["cached"].items():
        if floor_s is not None and r["step_p50_s"] > MAX_STEP_RATIO * floor_s:
            yield (
                f"* {name}: to reach {floor_s * 1e3:.2f} ms a step its store would have to give "
                f"{r['rows_fetched'] / floor_s:,.0f} and take {r['rows_written'] / floor_s:,.0f} rows a second."
            )
    busy = (
        f"{name}: " + ", ".join(f"{lane} {time_s * 1e3:.2f} ms" for lane, time_s in r["lanes_s"].items())
        for name, r in part["cached"].items()
    )
    yield f"* Busy per step: {'; '.join(busy)}\n"


def _step_rows(part: Values, floor_s: float | None) -> Iterator[tuple[str, ...]]:
    for name, time_s in part["resident_s"].items():
        again_s = part["resident_again_s"].get(name)
        again = "" if again_s is None else f" (again: {again_s * 1e3:.2f})"
        yield (f"all resident, {name}", f"{time_s * 1e3:.2f}{again}", _ratio(time_s, floor_s), "-", "-", "-", "-")
    for name, r in part["cached"].items():
        yield (
            f"cached, {name}",
            f"{r['step_p50_s'] * 1e3:.2f}",
            _ratio(r["step_p50_s"], floor_s),
            f"{r['rows_fetched']:,.0f}",
            f"{r['rows_written']:,.0f}",
            f"{r['exposed_s'] * 1e3:.2f}",
            f"{r['loss']:.6f}",
        )
    for name, why in part["missing"].items():
        yield (name, f"not measured: {why}", "", "", "", "", "")


def _feed(values: Values) -> Iterator[str]:
    part, settings = found_of(values, "feed"), _settings(values, "feed")
    yield "### How fast the host can feed a device\n"
    yield (
        f"A step of {settings['batch_size']:,} examples in the steady state: {part['rows_unique']:,.0f} unique rows, "
        f"{part['rows_fetched']:,.0f} fetched, {part['rows_evicted']:,.0f} evicted.\n"
    )
    headers = ("", "steps/s", "rows/s", "client's CPU time, s per million rows")
    yield table(headers, _feed_rows(values, part, settings))


def _feed_rows(values: Values, part: Values, settings: Values) -> Iterator[tuple[str, ...]]:
    steps = found_of(values, "steps")
    is_same_step = steps is not None and _sizes(_settings(values, "steps")) == _sizes(settings)
    floor_s = _floor_s(steps) if is_same_step else None
    if floor_s is not None:
        where = "the GPU" if _on_gpu(values) else "this machine's CPU, for comparison"
        rows = f"{part['rows_fetched'] / floor_s:,.0f} fetched, {part['rows_evicted'] / floor_s:,.0f} written"
        yield (f"{where}, all rows resident", f"{1 / floor_s:,.1f}", rows, "-")
    yield ("planner, one thread", f"{1 / part['plan_s']:,.1f}", "-", "-")
    yield ("preparation of plan and inputs, one thread", f"{1 / part['prepare_s']:,.1f}", "-", "-")
    for name, rates in part["stores"].items():
        both = rates["rows_read_and_written_per_s"]
        yield (
            f"{name}, one client",
            f"{both / max(1.0, part['rows_fetched']):,.1f}",
            f"{both:,.0f} read and as many written concurrently; {rates['rows_read_per_s']:,.0f} read alone, "
            f"{rates['rows_written_per_s']:,.0f} written alone",
            f"{rates['cpu_s_per_million_read_and_written']:.2f} read and as many written concurrently; "
            f"{rates['cpu_s_per_million_read']:.2f} read alone, {rates['cpu_s_per_million_written']:.2f} written alone",
        )
    for name, why in part["missing"].items():
        yield (name, f"not measured: {why}", "", "")


def _floor_s(part: Values) -> float | None:
    """The fastest step with all rows resident, before or after the cached runs."""
    times_s = [*part["resident_s"].values(), *part["resident_again_s"].values()]
    return min(times_s) if times_s else None


def _ratio(time_s: float, floor_s: float | None) -> str:
    return "-" if floor_s is None else f"{time_s / floor_s:.2f}"


def _sizes(settings: Values) -> Values:
    """All settings except which parts to measure."""
    return {name: value for name, value in settings.items() if name != "parts"}


#: Part -> its tables, in the order of the report; `trace` has none.
_WRITERS: Mapping[str, Callable[[Values], Iterator[str]]] = {
    "kernels": _kernels,
    "steps": _steps,
    "feed": _feed,
}


def checks(values: Values) -> list[str]:
    """A line per check, with pass, MISS or not measured. There are none for results from a CPU."""
    if not _on_gpu(values):
        return []
    return [*_step_checks(values), *_kernel_checks(values)]


def _step_checks(values: Values) -> Iterator[str]:
    part = found_of(values, "steps") or {"resident_s": {}, "resident_again_s": {}, "cached": {}}
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


def _kernel_checks(values: Values) -> Iterator[str]:
    records = [r for r in found_of(values, "kernels") or [] if _OURS in r["update_s"]]
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
