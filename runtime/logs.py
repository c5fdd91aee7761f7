"""How does a log line look? For people, or with --log-format json one object a line; what is in it is never a prompt.

Set up once, by the command line.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]
FACTS = "facts"
"""`extra={FACTS: {...}}` of a record: fields of the JSON object."""


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logs(form: LogFormat) -> None:
    """Process-wide: warnings of everybody, and what Strata itself tells."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("strata").setLevel(logging.INFO)
