"""Logging to standard error, as text or as one JSON object per line.

    2026-11-22T17:40:55.123Z INFO    prefill-0: request req-1: prefill of 12 tokens
    {"time": "2026-11-22T17:40:55.123Z", "level": "info", "component": "prefill-0", "request_id": "req-1", "event": ...}

`configure_logging` sets the component of the process. In a process with several components, each line has its own
(`workers.log_fields`). Lines that anyone who connects can cause are limited in time.
"""

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any

from cluster.spec import LogSpec

OURS = ("cluster", "workers", "kvtransfer")
REPEAT_S = 10.0


def configure_logging(spec: LogSpec, component: str) -> None:
    """Set up logging for this process; may be called again. Our packages log from `spec.level`, others warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(component) if spec.format == "json" else TextLines(component))
    handler.addFilter(LimitRepeats())
    handler.set_name("diptych")
    root = logging.getLogger()
    for known in [each for each in root.handlers if each.get_name() == "diptych"]:
        root.removeHandler(known)
    root.addHandler(handler)
    for package in OURS:
        logging.getLogger(package).setLevel(spec.level.upper())


class LimitRepeats(logging.Filter):
    """Passes one line in `REPEAT_S` of each place in other packages, and in ours with `extra={"repeats": True}`.

    So who sends garbage to a port cannot fill the disk. The next line says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[Any, ...], tuple[float, int]] = {}  # time of the last line, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] in OURS and not getattr(record, "repeats", False):
            return True
        place = record.pathname, record.lineno, record.exc_info and record.exc_info[0]
        now_s = time.monotonic()
        last_s, num_left_out = self._last.get(place, (-REPEAT_S, 0))
        if now_s - last_s < REPEAT_S:
            self._last[place] = last_s, num_left_out + 1
            return False
        self._last[place] = now_s, 0
        if num_left_out:
            record.msg, record.args = f"{record.getMessage()} ({num_left_out} more like it since the last line)", ()
        return True


class ComponentFormatter(logging.Formatter):
    """`component`: for lines without one."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def component(self, record: logging.LogRecord) -> str:
        return str(getattr(record, "component", "")) or self._component


class JsonLines(ComponentFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "component": self.component(record),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        line |= {"event": record.getMessage(), "logger": record.name} | getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(ComponentFormatter):
    def format(self, record: logging.LogRecord) -> str:
        text, request_id = record.getMessage(), _request_id(record)
        named = "" if request_id in text else f"request {request_id}: "
        line = f"{_time(record)} {record.levelname:<7} {self.component(record)}: {named}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", ""))
