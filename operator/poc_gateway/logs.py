# SPDX-License-Identifier: Apache-2.0
"""Lines on standard error: JSON with the fields of the operator's, or plain text."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["json", "plain"]
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: message, timestamp, severity, logger, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102 - see the class
        line = {
            "message": record.getMessage(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "severity": "warn" if record.levelno == logging.WARNING else record.levelname.lower(),
            "logger": record.name,
        }
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: LogFormat = "json") -> None:
    """Send everything from INFO on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # One line per migration and none about what it is for.
    logging.getLogger("alembic").setLevel(logging.WARNING)
