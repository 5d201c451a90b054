"""Skips what cannot run here, and runs the children that the selected tests need.

Markers: ``release(*versions)``, the releases that a test is for; ``gpus(count)``, how many GPUs
it needs where that is not one; ``needs(*templates)``, its children, such as
``"kind/{case}/stock"`` for the test's parameter ``case``; ``core`` and
``extra``, for ``-m`` where time is short; ``may_not_start``, for what stock vLLM itself may be
unable to start with dummy weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import machine, plan
from .children import Children, Result


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    for line in (
        "release(*versions): the vLLM releases that a GPU test is for",
        "gpus(count): how many GPUs a GPU test needs, where that is not one",
        "needs(*templates): the child processes whose reports a GPU test reads",
        "core: a GPU test that is run first",
        "extra: a GPU test that is run where time is left",
        "may_not_start: a GPU test that is skipped where stock vLLM cannot run its engine",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need another machine or another release, with the reason."""
    for item in items:
        count = item.get_closest_marker("gpus")
        release = item.get_closest_marker("release")
        reason = machine.too_few_gpus(*count.args) if count is not None else None
        if reason is None and release is not None:
            reason = machine.why_not(*release.args)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def needed(item: pytest.Item) -> list[str]:
    """The names of the children that a test reads."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [
        template.format(**parameters)
        for marker in item.iter_markers("needs")
        for template in marker.args
    ]


@pytest.fixture(scope="session")
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    """All children of the selected tests, started in the order of the plan."""
    wanted = {
        name
        for item in request.session.items
        if item.get_closest_marker("skip") is None
        for name in needed(item)
    }
    all_children = plan.children(machine.vllm_version() or "")
    running = Children()
    running.start(child for name, child in all_children.items() if name in wanted)
    yield running
    running.close()
    print(f"\nresults and logs: {running.out}")


@pytest.fixture
def case() -> str:
    """The one parameter of a test; parametrized where there are several."""
    return ""


@pytest.fixture
def results(request: pytest.FixtureRequest, children: Children, case: str) -> list[Result]:
    """The results of a test's children, in the order of its markers."""
    found = [children.result(name) for name in needed(request.node)]
    for result in found:
        if result.status == "not run":
            pytest.skip(result.why())
    return found


@pytest.fixture
def pair(results: list[Result], request: pytest.FixtureRequest) -> tuple[Result, Result]:
    """Stock and plugin, both of which have run.

    Skips where stock does not run something that it need not: that proves nothing, either way.
    Where stock runs it, the plugin must.
    """
    stock, plugin = results
    if not stock.ok and request.node.get_closest_marker("may_not_start") is not None:
        pytest.skip(f"stock does not run this: {stock.why()}")
    for result in (stock, plugin):
        assert result.ok, result.why()
    return stock, plugin
