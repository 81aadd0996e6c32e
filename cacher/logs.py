"""JSON logs, one line per event: time, level, event and its fields."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["LEVELS", "STREAMS", "JsonLines", "start_logging"]

LEVELS = ("debug", "info", "warning", "error")
STREAMS = ("stderr", "stdout")

#: Attributes of every record. Others come from `extra`.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One JSON object per record. Times are UTC, with milliseconds."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _COMMON},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _is_told(record: logging.LogRecord) -> bool:
    """False for the record that grpc writes, with a traceback, where a peer is gone before its status is sent."""
    return not (record.name.startswith("grpc") and str(record.msg).startswith("ExecuteBatchError raised in core"))


def start_logging(level: str, stream: str = "stderr") -> None:
    """Log all records at or above `level` to one of `STREAMS`."""
    handler = logging.StreamHandler(getattr(sys, stream))
    handler.setFormatter(JsonLines())
    handler.addFilter(_is_told)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
