"""Waiting for a logger to be switched on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def when_enabled(logger: logging.Logger, level: int, callback: Callable[[], None]) -> None:
    """Call ``callback()`` when first anything is logged and ``logger`` logs this level.

    There is no event for a change of the configuration, but whoever logs makes a record, and
    factories of records are made to be chained: vLLM's own keeps the one that was there.

    Args:
        logger: the logger that says nothing yet.
        level: such as ``logging.INFO``.
        callback: may log; must not raise, since that would fail somebody's log line.
    """
    factory = logging.getLogRecordFactory()
    waiting = True

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        nonlocal waiting
        if waiting and logger.isEnabledFor(level):
            waiting = False
            # Out of the chain again, where nobody has been chained behind.
            if logging.getLogRecordFactory() is make_record:
                logging.setLogRecordFactory(factory)
            callback()
        return factory(*args, **kwargs)

    logging.setLogRecordFactory(make_record)
