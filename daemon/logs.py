"""The log: a line an event on stderr, as text or JSON, with the ids of the request and its trace if there is one. No
prompts, no keys."""

import json
import logging
import sys
import time

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = getattr(record, "request_id", "")
        return f"{line} [{request_id}]" if request_id else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id", "span_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(log_format: str, level: str) -> None:
    """Send everything to stderr; once, at the start of a daemon."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(client_faults)


def client_faults(record: logging.LogRecord) -> bool:
    """What is no HTTP is its sender's fault: one line, where aiohttp would write an error with a traceback, with which
    anybody could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | RequestPayloadError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = f"{record.getMessage()}: {' '.join(str(error).split())[:200]}", ()
        record.exc_info = record.exc_text = None
    return True
