"""``skip-attention`` on Hopper: 0.20.2 with the V2 runner switched on, and 0.33.0."""

from __future__ import annotations

from typing import Any

import pytest

from . import plan
from .children import Result

Pair = tuple[Result, Result]

WITH, WITHOUT = "PIECEWISE with metadata", "PIECEWISE without"
FULL = "FULL with metadata"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
may_not_start = pytest.mark.may_not_start
GRAPH_MEMORY_SLACK = 32 << 20  # the caching allocator takes segments of 2 and 20 MiB


def calls(result: Result) -> dict[str, int]:
    """The counted calls of ``get_attention_context``."""
    return result.report["captures"]["calls"]


def state(result: Result) -> dict[str, Any]:
    """What the plugin says of the fix."""
    return next(fix for fix in result.report["plugin"] if fix["id"] == plan.SKIP)


def need_piecewise(stock: Result) -> None:
    """Skip where stock has nothing that could be skipped."""
    if stock.report["runner"] != V2_RUNNER:
        pytest.skip(f"stock runs this on {stock.report['runner']}")
    if not calls(stock).get(WITH):
        pytest.skip("stock makes no attention call with metadata in PIECEWISE passes")


# --- 0.20.2: the crash ------------------------------------------------------------------------


@pytest.mark.release(plan.V2_OPT_IN)
@pytest.mark.core
@pytest.mark.needs("poison/stock", "poison/plugin")
class TestPoisonedBlockTable:
    """Memory past the block table holds block numbers that no cache has."""

    def test_stock_dies_at_the_first_piecewise_step(self, results: list[Result]) -> None:
        stock, _ = results
        assert stock.status == "failed", stock.why()
        assert "illegal memory access" in stock.report.get("error", "") + stock.tail
        # FlashAttention ends the process itself: there is only what was printed before.
        last = [line for line in stock.tail.splitlines() if "Capturing CUDA graphs" in line][-1]
        assert last.endswith("(PIECEWISE): begins")

    def test_the_plugin_captures_every_size_and_serves(self, results: list[Result]) -> None:
        _, plugin = results
        assert plugin.ok, plugin.why()
        report = plugin.report
        assert state(plugin)["state"] == "applied"
        assert report["runner"] == V2_RUNNER
        assert sorted(report["captures"]["sizes"]["PIECEWISE"]) == report["capture_sizes"]
        assert report["capture_sizes"][-1] == 512
        assert calls(plugin).get(WITH, 0) == 0
        assert calls(plugin)[WITHOUT] > 0
        assert report["served"] == [1, 300]


# --- 0.33.0: every kind of model --------------------------------------------------------------

KINDS = [
    kind if kind in ("qwen3", "llama") else pytest.param(kind, marks=may_not_start)
    for kind in plan.KINDS
]


@pytest.mark.release(plan.V2)
@pytest.mark.core
@pytest.mark.parametrize("case", KINDS)
@pytest.mark.needs("kind/{case}/stock", "kind/{case}/plugin")
class TestKinds:
    """Each kind of model that starts on stock with dummy weights."""

    def test_no_attention_with_metadata_in_piecewise_passes(self, pair: Pair) -> None:
        stock, plugin = pair
        need_piecewise(stock)
        assert state(plugin)["state"] == "applied"
        assert state(plugin)["reason"] in ("", None)
        assert calls(plugin).get(WITH, 0) == 0, state(plugin)["notes"]
        passes = calls(stock)[WITH] + calls(stock).get(WITHOUT, 0)
        assert calls(plugin)[WITHOUT] == passes, "the passes themselves are still made"

    def test_full_captures_are_as_stock(self, pair: Pair) -> None:
        stock, plugin = pair
        need_piecewise(stock)
        assert calls(plugin).get(FULL) == calls(stock).get(FULL)
        assert calls(plugin).get(FULL), "no FULL graph was captured"
        for key in ("full_graphs", "cudagraph_mode", "attention"):
            assert plugin.report[key] == stock.report[key], key
        assert plugin.report["captures"]["sizes"] == stock.report["captures"]["sizes"]

    def test_tokens_are_as_stock(self, pair: Pair) -> None:
        stock, plugin = pair
        assert plugin.report["tokens"] == stock.report["tokens"]

    def test_graphs_take_no_more_memory(self, pair: Pair) -> None:
        stock, plugin = pair
        taken, allowed = plugin.report["captures"]["bytes"], stock.report["captures"]["bytes"]
        assert len(taken) == len(allowed)
        for mine, theirs in zip(taken, allowed, strict=True):
            assert mine <= theirs + GRAPH_MEMORY_SLACK


@pytest.mark.release(plan.V2)
@pytest.mark.core
@pytest.mark.parametrize("case", KINDS[: len(plan.PROFILED)])
@pytest.mark.needs("kind/{case}/stock", "kind/{case}/plugin")
def test_the_kv_cache_is_not_smaller(pair: Pair) -> None:
    stock, plugin = (result.report["num_gpu_blocks"] for result in pair)
    assert plugin >= 0.99 * stock


# --- 0.20.2 and 0.33.0: what the skipped passes warmed up -------------------------------------


def kernels(result: Result) -> set[str]:
    """What the first requests compiled, or loaded for the first time."""
    assert "triton" in result.report["kernels_watched"]
    return {*result.report["kernels_batch_1"], *result.report["kernels_largest"]}


def check_first_requests(pair: Pair) -> None:
    stock, plugin = pair
    for result in pair:
        assert result.report["served"] == [1, 64]
    assert kernels(plugin) - kernels(stock) == set()


BACKENDS = [
    pytest.param(f"{mode}/{backend}", marks=[may_not_start] if backend != "FLASH_ATTN" else [])
    for backend in plan.BACKENDS
    for mode in plan.CUDAGRAPH_MODES
]


@pytest.mark.parametrize("case", BACKENDS)
class TestFirstRequests:
    """The first requests, at batch 1 and at the largest batch."""

    @pytest.mark.release(plan.V2_OPT_IN, plan.V2)
    @pytest.mark.core
    @pytest.mark.needs("warm/{case}/stock", "warm/{case}/plugin")
    def test_compile_nothing_that_stock_did_not(self, pair: Pair) -> None:
        check_first_requests(pair)
        assert state(pair[1])["state"] == "applied"

    @pytest.mark.release(plan.V2)
    @pytest.mark.extra
    @pytest.mark.needs("cold/{case}/stock", "cold/{case}/plugin")
    def test_without_jit_warmup_the_engine_is_left_alone(self, pair: Pair) -> None:
        check_first_requests(pair)
        stock, plugin = pair
        assert any("JIT warm-up is off" in note for note in state(plugin)["notes"])
        assert calls(plugin) == calls(stock)


@pytest.mark.release(plan.V2)
@pytest.mark.extra
@pytest.mark.may_not_start
@pytest.mark.parametrize("case", plan.CUDAGRAPH_MODES)
@pytest.mark.needs("monitor/{case}/stock", "monitor/{case}/plugin")
def test_the_jit_monitor_finds_no_error(pair: Pair) -> None:
    """vLLM's own monitor, which fails a request that compiles a kernel; stock's may as well."""
    check_first_requests(pair)
