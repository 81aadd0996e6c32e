"""Rules of the data section's keys of streams: what data that grows does not go with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config.sections import Config, DataConfig

__all__ = ["STREAM_PROBLEMS"]

#: Formats whose files stand alone.
_FORMATS = ("avazu-csv", "criteo-tsv", "csv", "parquet", "tfrecord")
#: Formats whose lines stand alone.
_TOPIC_FORMATS = ("criteo-tsv", "csv")
_DEFAULTS = DataConfig()


def _follow_problem(config: Config) -> str | None:
    data = config.data
    if data.follow == "off":
        return None
    if data.is_topic:
        return f"{data.follow} is for a folder, and data.path {data.path} is a topic"
    if not data.path:
        return f"{data.follow} needs data.path, the folder that grows, got none"
    if "://" in data.path:
        return f"{data.follow} is for a local folder, got data.path {data.path}"
    if data.format not in _FORMATS:
        return f"{data.follow} needs data.format {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}, got {data.format}"
    return _order_problem(config, data.follow)


def _topic_problem(config: Config) -> str | None:
    data = config.data
    if not data.is_topic:
        return None
    if data.format not in _TOPIC_FORMATS:
        return (
            f"{data.path} needs data.format {' or '.join(_TOPIC_FORMATS)}, the lines of its messages, got {data.format}"
        )
    return _order_problem(config, data.path)


def _order_problem(config: Config, stream: str) -> str | None:
    """Problem of keys that need the end of the data before it is read; None: there are none."""
    data = config.data
    if data.epochs > 1:
        return f"{stream} needs data.epochs 1, got {data.epochs}: a stream is read once"
    if data.shuffle:
        return f"{stream} needs data.shuffle false, got true: the order of a stream is that of its arrival"
    if data.eval_fraction:
        return (
            f"{stream} needs data.eval_fraction 0, got {data.eval_fraction:g}: a stream has no last examples; "
            f"data.eval_path names files for evaluation"
        )
    if config.cacher.assign == "locality":
        return f"{stream} needs cacher.assign contiguous, got locality, which learns from all batches since the first"
    return None


def _needs(name: str, wanted: str, is_there: Callable[[DataConfig], bool]) -> Callable[[Config], str | None]:
    """The rule of a key that does nothing without what is wanted."""

    def problem(config: Config) -> str | None:
        value = getattr(config.data, name)
        if value == getattr(_DEFAULTS, name) or is_there(config.data):
            return None
        return f"{value} needs {wanted}"

    return problem


def _needs_stream(name: str) -> Callable[[Config], str | None]:
    wanted = "a stream: data.follow marker or age, or data.path kafka://…"
    return _needs(name, wanted, lambda data: data.is_stream)


def _needs_topic(name: str) -> Callable[[Config], str | None]:
    return _needs(name, "a topic: data.path kafka://…", lambda data: data.is_topic)


#: By key, the rest of a message that begins with it.
STREAM_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "data.path": _topic_problem,
    "data.follow": _follow_problem,
    "data.until": _needs_stream("until"),
    "data.stream_idle_s": _needs_stream("stream_idle_s"),
    "data.stream_wait_s": _needs_stream("stream_wait_s"),
    "data.follow_age_s": _needs("follow_age_s", "data.follow age", lambda data: data.follow == "age"),
    "data.kafka_run": _needs_topic("kafka_run"),
    "data.kafka_config": _needs_topic("kafka_config"),
}
