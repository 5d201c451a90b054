"""Run vLLM's own tests, with or without the plugin, and write down what became of each.

    python tests/releases/upstream_run.py REPORT TEST...

Run as a script, in the folder that holds vLLM's ``tests``, with stock sources on ``PYTHONPATH``
and ``VLLM_CGFIX`` as wanted. REPORT is a JSON file:

``outcomes``
    node id to pytest's own category, such as ``"passed"``, ``"failed"``, ``"error"``.
``details``
    node id to the error text of what failed.
``imported_early``
    modules that a fix edits and that were imported before the plugin was registered.
``status``
    fix id to its state at the end; empty without the plugin.
``edited``
    fix id to the modules that carry its edits at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class Outcomes:
    """A plugin of pytest that notes the category of each test and each module."""

    def __init__(self) -> None:
        self.categories: dict[str, str] = {}
        self.details: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        status = self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        self._note(report, status[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._note(report, "error" if report.failed else "skipped")

    def _note(self, report: pytest.TestReport | pytest.CollectReport, category: str) -> None:
        # A phase that tells nothing (a setup that succeeds) has no category; the last one that
        # has tells most: the error of a teardown comes after the test has passed.
        if category:
            self.categories[report.nodeid] = category
        if report.failed:
            self.details[report.nodeid] = report.longreprtext


def main(report: str, tests: list[str]) -> int:
    """Run the tests and write the report; returns 0 unless pytest itself went wrong."""
    import pytest

    import vllm_cgfix
    from vllm_cgfix import plugin
    from vllm_cgfix.fixes import CATALOGUE
    from vllm_cgfix.verify.cpu import use_cpu_platform

    before = dict(os.environ)
    use_cpu_platform()
    # It chooses a model runner for the reproductions; here each test makes its own choice.
    os.environ.clear()
    os.environ.update(before)
    imported_early = [m for fix in CATALOGUE for m in fix.edits if m in sys.modules]
    vllm_cgfix.register()

    outcomes = Outcomes()
    code = pytest.main(
        [
            # Their conftest.py collects garbage after each test, which takes many times as long as
            # the tests; without it 18 tests of 0.33.0 lack a fixture.
            *("-q", "--noconftest", "-c", os.devnull, "--rootdir", os.getcwd()),
            *("-p", "no:cacheprovider", "-W", "ignore", "--tb=short"),
            *("--continue-on-collection-errors", "--timeout", "120", *tests),
        ],
        plugins=[outcomes],
    )
    Path(report).write_text(
        json.dumps(
            {
                "outcomes": outcomes.categories,
                "details": outcomes.details,
                "imported_early": imported_early,
                "status": {s.fix.id: s.state.value for s in vllm_cgfix.status()},
                "edited": {
                    fix.id: [
                        name
                        for name in fix.edits
                        if name in plugin._process.editors
                        and plugin._process.editors[name].is_live(fix.id)
                    ]
                    for fix in CATALOGUE
                },
            }
        ),
        "utf-8",
    )
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code)


if __name__ == "__main__":
    # Both this project's package of tests and vLLM's are called ``tests``. This one is not
    # imported here: its folder gives its place to the one that holds vLLM's.
    sys.path[0] = os.getcwd()
    sys.exit(main(sys.argv[1], sys.argv[2:]))
