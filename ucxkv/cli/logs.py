"""Where the command's log events go: standard error, so that standard output carries answers only."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["log_to_stderr"]


def log_to_stderr(level: str, as_json: bool) -> None:
    """Configure structlog for this process. level: debug, info, warning or error."""
    renderer: structlog.types.Processor
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=True)
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,  # few events; and a test may configure again
    )
