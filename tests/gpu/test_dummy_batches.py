"""The fixes for dummy batches on Hopper, where the CPU cannot be a witness."""

from __future__ import annotations

from typing import Any

import pytest

from . import plan
from .children import Result
from .test_dispatch_order import LAST_STEPS, Pair, observations

pytestmark = pytest.mark.core

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"


def states(result: Result) -> dict[str, str]:
    """Fix id to state."""
    return {fix["id"]: fix["state"] for fix in result.report["plugin"]}


def check_stock_dies(stock: Result) -> None:
    """A device error: an illegal access, or what the next call to the device makes of it."""
    assert stock.status == "failed", stock.why()
    assert "CUDA error" in stock.report.get("error", "") + stock.tail
    assert "served" not in stock.report


def check_plugin_serves(plugin: Result, fix: str, runner: str) -> dict[str, Any]:
    """All of it, with that fix alone."""
    assert plugin.ok, plugin.why()
    assert {id_ for id_, state in states(plugin).items() if state == "applied"} == {fix}
    assert plugin.report["runner"] == runner
    assert plugin.report["capture_sizes"][-1] == 512
    assert plugin.report["served"] == [1, 300]
    return plugin.report["captures"]["sizes"]


@pytest.mark.release(plan.V1_PADDED)
@pytest.mark.parametrize("case", plan.SCHEDULING)
@pytest.mark.needs("slots/{case}/stock", "slots/{case}/plugin")
class TestDummySlots:
    """0.16.0, FLASH_ATTN: dummy batches of three sizes after six kinds of last real step."""

    def test_stock_overwrites_a_held_block(self, pair: Pair) -> None:
        stock, _ = pair
        assert stock.report["scenarios"].keys() == LAST_STEPS.keys()
        assert any(observed["changed_held"] for _, _, observed, _ in observations(stock))

    def test_no_held_block_changes(self, pair: Pair) -> None:
        _, plugin = pair
        assert states(plugin)[plan.SLOTS] == "applied"
        for name, size, observed, _ in observations(plugin):
            assert observed["changed_held"] == {}, name
            assert observed["held"] > 0, "a cache that nobody uses cannot be harmed"
            for context in observed["contexts"]:
                assert (context["mode"], context["num_tokens"]) == ("FULL", size), name
                assert context["metadata"], name

    def test_tokens_are_those_without_dummy_batches(self, pair: Pair) -> None:
        _, plugin = pair
        for name, _, observed, reference in observations(plugin):
            for key in ("tokens", "served_from_cache"):
                assert observed[key] == reference[key], (name, key)


@pytest.mark.release(plan.V2_OPT_IN)
@pytest.mark.needs("lengths/stock", "lengths/plugin")
class TestDummyLengths:
    """0.20.2, V2 runner, FLASH_ATTN: memory past the block table is poisoned from the start."""

    def test_stock_dies(self, results: list[Result]) -> None:
        check_stock_dies(results[0])

    def test_the_plugin_captures_every_size_and_serves(self, results: list[Result]) -> None:
        sizes = check_plugin_serves(results[1], plan.LENGTHS, V2_RUNNER)
        assert sorted(sizes["PIECEWISE"]) == results[1].report["capture_sizes"]


@pytest.mark.release(plan.V2)
@pytest.mark.needs("clamp/stock", "clamp/plugin")
class TestDummySeqClamp:
    """0.33.0, V1 runner, TRITON_ATTN: FULL graphs of up to 512 tokens, ``max_model_len`` 64."""

    def test_stock_dies(self, results: list[Result]) -> None:
        check_stock_dies(results[0])

    def test_the_plugin_captures_and_serves(self, results: list[Result]) -> None:
        check_plugin_serves(results[1], plan.CLAMP, V1_RUNNER)
