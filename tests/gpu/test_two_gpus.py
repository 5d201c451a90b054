"""``dispatch-order`` with two data-parallel ranks on two GPUs: a rank that idles for long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import plan
from .children import Result
from .drivers import two_ranks
from .drivers.two_ranks import ALONE, COORDINATION, IDLE, IDLE_PADDED

pytestmark = [pytest.mark.gpus(two_ranks.RANKS), pytest.mark.release(plan.V1), pytest.mark.core]

MANY = 200
"""Steps that the busy rank works, and dummy batches of the idle one."""


def ranks(result: Result) -> list[dict[str, Any]]:
    """The reports of both ranks."""
    return result.report["ranks"]


def phases(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each phase of each rank, by a name that tells it."""
    for number, rank in enumerate(ranks(result)):
        assert rank["phases"].keys() == set(two_ranks.PHASES)
        for name, seen in rank["phases"].items():
            yield f"rank {number}, {name}", seen


def answers(rank: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Each prompt's tokens: uncached twice, from the cache at once, and from it at the end."""
    alone = [tokens for (tokens,) in rank["tokens"][ALONE]]
    again = [tokens for (tokens,) in rank["tokens"][two_ranks.AGAIN]]
    return [
        dict(zip(("uncached", "repeated", "cached", "again"), (*three, last), strict=True))
        for three, last in zip(zip(*[iter(alone)] * 3, strict=True), again, strict=True)
    ]


def repeatable(result: Result) -> bool:
    """Whether ranks that both work give the same answers twice: no dummy batch is in between."""
    return all(each["uncached"] == each["repeated"] for r in ranks(result) for each in answers(r))


def unequal(result: Result) -> dict[str, int]:
    """How many answers from the cache are not what they were, by what they are compared to."""
    every = [each for rank in ranks(result) for each in answers(rank)]
    return {
        "before the rank idled": sum(each["again"] != each["cached"] for each in every),
        # Two ways to compute one thing in bfloat16: where these differ of themselves, no dummy
        # batch need be at fault.
        "uncached": sum(
            each["again"] != each["uncached"]
            for each in every
            if each["cached"] == each["uncached"]
        ),
    }


def changed(result: Result) -> dict[str, dict[str, str]]:
    """Held blocks that dummy batches changed, by rank and phase."""
    return {name: seen["changed_held"] for name, seen in phases(result) if seen["changed_held"]}


def steps(seen: dict[str, Any]) -> int:
    """Batches of a rank in a phase, real or not: each is one step of its engine's loop."""
    return seen["real"] + seen["dummy"]


@pytest.mark.parametrize("case", plan.V1_BACKENDS)
@pytest.mark.needs("dp/{case}/stock", "dp/{case}/plugin")
class TestIdleRank:
    """A mixture of experts, half of them on each rank; one rank idles beside the other."""

    @pytest.fixture
    def stock(self, results: list[Result]) -> Result:
        """Stock vLLM, which may have the fault, and may hang of it; or else come to its end."""
        stock = results[0]
        assert stock.ok or "hang" in stock.report, stock.why()
        return stock

    @pytest.fixture
    def plugin(self, results: list[Result]) -> Result:
        """The same with the plugin, which must come to its end."""
        plugin = results[1]
        assert "hang" not in plugin.report, plugin.why()
        assert plugin.ok, plugin.why()
        return plugin

    def test_what_stock_does(self, stock: Result, record_property: Any) -> None:
        """Not a claim, but what the others are to be read with."""
        record_property("hang", stock.report.get("hang", "none"))
        if stock.ok:
            record_property("same answers where both ranks work", repeatable(stock))
            record_property("unequal answers from the cache", unequal(stock))
            record_property("changed held blocks", changed(stock))
        for rank in ranks(stock):
            for seen in rank.get("phases", {}).values():
                assert seen["plugin"] == []

    def test_the_fix_is_applied_in_both_engine_cores(self, plugin: Result) -> None:
        for rank in ranks(plugin):
            assert rank["process"]["core"] == "DPEngineCoreProc"
            assert rank["process"]["cudagraph_mode"].endswith("FULL_AND_PIECEWISE")
        for name, seen in phases(plugin):
            states = {fix["id"]: fix["state"] for fix in seen["plugin"]}
            assert states[plan.DISPATCH] == "applied", name
        first, second = (rank["process"] for rank in ranks(plugin))
        assert first["device"] != second["device"]

    def test_one_rank_idles_for_long(self, plugin: Result, record_property: Any) -> None:
        busy, idle = (rank["phases"][IDLE] for rank in ranks(plugin))
        record_property("dummy batches", idle["dummy"])
        assert busy["real"] >= MANY
        assert idle["real"] == 1
        assert idle["dummy"] >= MANY
        assert idle["stretches"] == 1, "nothing but dummy batches after its own token"
        assert idle["held"] > 0, "a cache that nobody uses cannot be harmed"

    def test_dummy_batches_carry_metadata(self, plugin: Result) -> None:
        for name, seen in phases(plugin):
            assert not [c for c in seen["contexts"] if c.startswith("FULL ") and "without" in c], (
                name
            )
        idle = ranks(plugin)[1]["phases"]
        assert idle[IDLE]["contexts"] == {"FULL 1 with": idle[IDLE]["dummy"]}
        # Beside five requests, for which the graph of 8 is replayed.
        assert idle[IDLE_PADDED]["contexts"]["FULL 8 with"] > 0

    def test_no_held_block_changes(self, plugin: Result) -> None:
        assert changed(plugin) == {}

    def test_collectives_match(self, stock: Result, plugin: Result) -> None:
        for name in two_ranks.PHASES:
            busy, idle = (rank["phases"][name] for rank in ranks(plugin))
            assert busy["all_reduce"] == idle["all_reduce"], name
            assert steps(busy) == steps(idle), name
        if not stock.ok:
            return
        for (name, mine), (_, theirs) in zip(phases(plugin), phases(stock), strict=True):
            # As many a step as in stock; five requests may take a step more to get there.
            assert mine["all_reduce"][COORDINATION] * steps(theirs) == theirs["all_reduce"][
                COORDINATION
            ] * steps(mine), name
            if not name.endswith(IDLE_PADDED):
                assert mine["all_reduce"] == theirs["all_reduce"], name

    def test_answers_are_from_the_cache_or_not(self, plugin: Result) -> None:
        for rank in ranks(plugin):
            alone = [count for (count,) in rank["from_cache"][ALONE]]
            again = [count for (count,) in rank["from_cache"][two_ranks.AGAIN]]
            assert set(alone[0::3] + alone[1::3]) == {0}
            assert alone[2::3] == again, "as much of each prompt as before the rank idled"
            assert min(again) > 0

    def test_the_cache_serves_what_it_should(
        self, stock: Result, plugin: Result, record_property: Any
    ) -> None:
        record_property("unequal answers from the cache", unequal(plugin))
        if stock.ok and not repeatable(stock):
            pytest.skip("stock gives unequal answers with both ranks at work: blocks must do")
        assert repeatable(plugin)
        assert unequal(plugin) == {"before the rank idled": 0, "uncached": 0}
        every = [each for rank in ranks(plugin) for each in answers(rank)]
        comparable = [each for each in every if each["cached"] == each["uncached"]]
        assert len(comparable) > len(every) / 2
        assert len({tuple(each["again"]) for each in every}) == len(every), "a model that answers"

    def test_speed_of_the_busy_rank(
        self, stock: Result, plugin: Result, record_property: Any
    ) -> None:
        """Recorded: with one token a step, its steps a second. Noise is no failure."""
        mine = ranks(plugin)[0]["phases"][IDLE]["steps_per_second"]
        record_property("plugin, tokens a second", mine)
        record_property("others on the GPUs", plugin.report["shared_gpu"])
        assert mine > 0
        if stock.ok:
            theirs = ranks(stock)[0]["phases"][IDLE]["steps_per_second"]
            record_property("stock, tokens a second", theirs)
            record_property("plugin / stock", round(mine / theirs, 4))
            record_property("within 2 %", abs(mine / theirs - 1) <= 0.02)
