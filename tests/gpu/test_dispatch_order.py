"""``dispatch-order`` on Hopper: 0.11.2, FLASH_ATTN (FA3) and FLASHINFER."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import plan
from .children import Result

pytestmark = pytest.mark.release(plan.V1)

SIZES = {"own": 1, "8": 8, "64": 64}
LAST_STEPS = {
    "fresh prefill": "fresh",
    "prefill on a cached prefix": "cached",
    "chunked prefill": "chunk",
    "decode": "decode",
    "decode of 8": "decode",
    "mixed": "decode+fresh",
}

Pair = tuple[Result, Result]
ENGINES = [f"{backend}/{way}" for way in plan.SCHEDULING for backend in plan.V1_BACKENDS]


def observations(result: Result) -> Iterator[tuple[str, int, dict[str, Any], dict[str, Any]]]:
    """Each (name, size of the dummy batch, what was observed, the same without dummy batches)."""
    assert result.report["scenarios"].keys() == LAST_STEPS.keys()
    for scenario, found in result.report["scenarios"].items():
        for label, size in SIZES.items():
            yield f"{scenario}, {label}", size, found[label], found["reference"]


@pytest.mark.core
@pytest.mark.parametrize("case", ENGINES)
@pytest.mark.needs("kv/{case}/stock", "kv/{case}/plugin")
class TestEngine:
    """One engine, dummy batches of three sizes after six kinds of last real step."""

    def test_the_fix_is_applied(self, pair: Pair) -> None:
        stock, plugin = pair
        assert stock.report["plugin"] == []
        states = {fix["id"]: fix["state"] for fix in plugin.report["plugin"]}
        assert states[plan.DISPATCH] == "applied"

    def test_the_scenarios_are_what_they_are_called(self, pair: Pair) -> None:
        for result in pair:
            for scenario, found in result.report["scenarios"].items():
                for label in SIZES:
                    observed = found[label]
                    assert observed["steps"][-1] == LAST_STEPS[scenario], (scenario, label)
                    assert observed["held"] > 0, "a cache that nobody uses cannot be harmed"

    def test_full_dummy_batches_carry_metadata(self, pair: Pair) -> None:
        for result, expected in zip(pair, (False, True), strict=True):
            for name, size, observed, _ in observations(result):
                contexts = observed["contexts"]
                assert contexts, name
                for context in contexts:
                    assert (context["mode"], context["num_tokens"]) == ("FULL", size), name
                    assert context["metadata"] is expected, (result.name, name)
                    if expected:
                        assert context["metadata_tokens"] == size, name

    def test_no_held_block_changes(self, pair: Pair) -> None:
        _, plugin = pair
        changed = {
            name: observed["changed_held"]
            for name, _, observed, _ in observations(plugin)
            if observed["changed_held"]
        }
        assert changed == {}

    def test_tokens_are_those_without_dummy_batches(self, pair: Pair) -> None:
        _, plugin = pair
        for name, _, observed, reference in observations(plugin):
            for key in ("tokens", "served_from_cache"):
                assert observed[key] == reference[key], (name, key)

    def test_the_cache_serves_the_tokens_of_the_uncached_prompt(self, pair: Pair) -> None:
        _, plugin = pair
        comparable = 0
        for name, _, observed, reference in observations(plugin):
            for request, tokens in reference["uncached"].items():
                # Two ways to compute one thing in bfloat16: where the two best tokens are close,
                # the answers can differ with no dummy batch at all.
                if reference["served_from_cache"][request] == tokens:
                    comparable += 1
                    assert observed["served_from_cache"][request] == tokens, (name, request)
        prompts = sum(len(reference["uncached"]) for *_, reference in observations(plugin))
        assert comparable > prompts / 2

    def test_without_dummy_batches_the_plugin_changes_nothing(self, pair: Pair) -> None:
        stock, plugin = pair
        for (name, _, _, with_stock), (_, _, _, with_plugin) in zip(
            observations(stock), observations(plugin), strict=True
        ):
            assert with_plugin == with_stock, name


@pytest.mark.core
@pytest.mark.parametrize("case", plan.SCHEDULING)
@pytest.mark.needs("kv/FLASHINFER/{case}/stock", "kv/FLASHINFER/{case}/plugin")
def test_stock_flashinfer_overwrites_a_held_block(pair: Pair) -> None:
    stock, _ = pair
    changed = [name for name, _, observed, _ in observations(stock) if observed["changed_held"]]
    assert changed, "without a fault on stock the test of the plugin proves nothing"


@pytest.mark.core
@pytest.mark.needs("hang/stock", "hang/plugin")
def test_look_for_a_hang(results: list[Result], record_property: Any) -> None:
    """Stock may hang or not: what was found is recorded. The plugin must not."""
    stock, plugin = results
    found = stock.report.get("hang") or stock.report.get("summary")
    record_property("stock", found)
    print(f"stock: {found}")
    assert found, f"the search itself failed: {stock.why()}"
    assert plugin.ok, plugin.why()
    assert "hang" not in plugin.report
    assert plugin.report["full_replays"] > 0
    assert plugin.report["full_replays_without_metadata"] == 0
