# SPDX-License-Identifier: Apache-2.0
"""What a line of the log is about, as fields of the same names in the operator, the gateway and the pods.

`bound` names what everything is about that is logged within it, in this task and in the tasks begun from it::

    with bound(round=uid, slot=offset):
        log.warning("a callback failed")

| field | value |
| --- | --- |
| `round` | uid of the PoCRound, which pods are told as ``round_id`` |
| `slot` | the slot's first nonce |
| `pod` | name of the pod |
| `request` | id of a request: of one over HTTP, or of a job |

Needs the standard library alone, since all three processes import it.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TypedDict, Unpack

LogFormat = Literal["json", "plain"]


class Fields(TypedDict, total=False):
    """What a line can be about; a field that is None is not known."""

    round: str | None
    slot: int | None
    pod: str | None
    request: str | None


FIELDS = tuple(Fields.__annotations__)
_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_context: ContextVar[Mapping[str, str | int]] = ContextVar("vllm_poc_log", default=MappingProxyType({}))


@contextmanager
def bound(**fields: Unpack[Fields]) -> Iterator[None]:
    """Add fields to every line that is logged within; one that is bound already gets the new value meanwhile."""
    known = {name: value for name, value in fields.items() if isinstance(value, str | int)}
    token = _context.set({**_context.get(), **known})
    try:
        yield
    finally:
        _context.reset(token)


class BoundFields(logging.Filter):
    """Lets every record through, with the bound fields as attributes; those that a line says of itself stay."""

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: D102 - see the class
        for name, value in _context.get().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


_FILTER = BoundFields()


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module of the pod's.

    Its name lies below ``vllm``, the only tree that vLLM configures: there it has vLLM's format, and obeys
    VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH. Beside it, INFO would vanish. A formatter that such a configuration
    names finds the bound fields as attributes of the record.
    """
    logger = logging.getLogger(f"vllm.{module}")
    logger.addFilter(_FILTER)
    return logger


def bind_handlers(logger: logging.Logger) -> None:
    """Let all that the handlers of ``logger`` are given have the bound fields, other libraries' lines among them."""
    for handler in logger.handlers:
        handler.addFilter(_FILTER)


def configure(log_format: LogFormat = "json") -> None:
    """Send everything from INFO on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter(_PLAIN))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    bind_handlers(logging.getLogger())


def fields_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Return what a record is about, in the order of `FIELDS`."""
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: message, timestamp, severity, logger, fields, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102 - see the class
        line: dict[str, str | int] = {
            "message": record.getMessage(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "severity": "warn" if record.levelno == logging.WARNING else record.levelname.lower(),
            "logger": record.name,
            **fields_of(record),
        }
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        return json.dumps(line)


class PlainFormatter(logging.Formatter):
    """Plain text, with the fields in brackets behind the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 - see the class; logging's name
        text = super().formatMessage(record)
        about = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        return f"{text} [{about}]" if about else text
