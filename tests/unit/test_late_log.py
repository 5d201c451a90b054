"""Logging that is configured after the plugin has something to say."""

from __future__ import annotations

import logging

import pytest

from vllm_cgfix.late_log import when_enabled


@pytest.fixture(autouse=True)
def _factory():
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def test_it_calls_once_when_the_logger_is_switched_on():
    parent, child, other = (logging.getLogger(f"late{name}") for name in ("", ".child", ".other"))
    said = []

    def say():
        said.append(child.isEnabledFor(logging.INFO))
        child.info("from within")

    when_enabled(child, logging.INFO, say)
    other.warning("the logger is off")
    assert said == []
    parent.setLevel(logging.INFO)
    assert said == [], "nothing was logged since"
    other.info("first")
    other.info("second")
    assert said == [True]


def test_factories_are_chained(caplog):
    class Record(logging.LogRecord):
        pass

    logging.setLogRecordFactory(Record)
    when_enabled(logging.getLogger("late.chained"), logging.INFO, lambda: None)
    logging.getLogger("late.somebody").warning("text of %s", "theirs")
    (record,) = caplog.records
    assert isinstance(record, Record)
    assert record.getMessage() == "text of theirs"
