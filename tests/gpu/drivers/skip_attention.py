"""One engine of the V2 runner: what its captures do, and whether it serves as it should.

Reports the calls of generic attention by the mode of the descriptor, the graphs and their memory,
the blocks of the KV cache, the tokens, and the kernels that the first requests compile.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from . import engine, models
from .captures import Captures

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"model": "llama"},
    "mla": {"model": "mla"},
    "sliding": {"model": "sliding"},
    "mamba": {"model": "mamba"},
    "gdn": {"model": "gdn"},
    "moe": {"model": "moe"},
    "lora": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
    "eagle": {"model": "llama", "speculative_config": {"method": "eagle"}},
    "draft": {"model": "llama", "speculative_config": {"method": "draft_model"}},
}
RANDOMIZED = ("qwen3", "llama", "sliding", "moe", "lora")
"""Whose weights are what the model reads: nothing is derived from them when they are loaded."""
LARGEST = 64


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``LLM``."""
    chosen = dict(KINDS[arguments.kind])
    if "speculative_config" in chosen:
        draft = "eagle" if arguments.kind == "eagle" else "draft"
        chosen["speculative_config"] = chosen["speculative_config"] | {
            "model": models.write_model(draft, Path(os.getcwd())),
            "num_speculative_tokens": 2,
        }
    chosen["compilation_config"] = {"cudagraph_mode": arguments.cudagraph_mode}
    if arguments.backend:
        chosen["attention_backend"] = arguments.backend
    if arguments.no_jit_warmup:
        chosen["kernel_config"] = {"enable_jit_warmup": False}
    if arguments.jit_monitor:
        chosen["jit_monitor_mode"] = arguments.jit_monitor
    if not arguments.profile_memory:
        chosen["kv_cache_memory_bytes"] = 2 << 30
    return chosen


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    engine.prepare(report, shared_gpu=arguments.shared_gpu)
    captures = Captures(count_calls=True)
    kernels = engine.Kernels()
    chosen = settings(arguments)
    report.put("stage", "start")
    with report.phase("start"):
        llm = engine.make_llm(chosen.pop("model", "qwen3"), max_num_batched_tokens=2048, **chosen)
    report.put("stage", "started")
    runner = engine.runner(llm)
    report.put("runner", type(runner).__module__)
    report.put("captures", captures.summary())
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None:  # the V1 runner, chosen for what V2 does not support, has none
        report.put("full_graphs", len(manager.graphs))
        report.put("cudagraph_mode", manager.cudagraph_mode.name)
    report.put("num_gpu_blocks", engine.core(llm).vllm_config.cache_config.num_gpu_blocks)
    report.put("attention", attention_implementations(llm))
    report.put("plugin", engine.plugin_state())

    report.put("kernels_watched", kernels.watched)
    kernels.take()  # those of the start
    lora = lora_requests(arguments)
    with report.phase("batch of 1"):
        first = engine.generate(llm, [engine.prompt(1, 33)], 4, **lora)
    report.put("kernels_batch_1", kernels.take())
    with report.phase("largest batch"):
        prompts = [engine.prompt(10 + i, 5 + i) for i in range(LARGEST)]
        many = engine.generate(llm, prompts, 4, **lora)
    report.put("kernels_largest", kernels.take())
    report.put("served", [len(first), len(many)])

    if arguments.kind in RANDOMIZED:
        llm.reset_prefix_cache()
        engine.randomize_weights(llm)
    with report.phase("tokens"):
        lengths = (3, 16, 40, 100, 300, 1500)
        prompts = [engine.prompt(50 + n, n) for n in lengths]
        tokens = [engine.generate(llm, [p], 16, **lora)[0] for p in prompts]
        report.put("tokens", {"alone": tokens, "together": engine.generate(llm, prompts, 16)})
    report.put("plugin", engine.plugin_state())
    report.put("stage", "done")
    report.put("summary", f"{captures.calls or 'no calls counted'}; served 1 and {LARGEST}")


def attention_implementations(llm: Any) -> list[str]:
    """The classes of the attention layers' implementations."""
    layers = engine.core(llm).vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(getattr(layer, "impl", layer)).__name__ for layer in layers})


def lora_requests(arguments: argparse.Namespace) -> dict[str, Any]:
    """The argument of ``generate`` that makes requests use the adapter."""
    if arguments.kind != "lora":
        return {}
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest("random", 1, models.write_lora(Path(os.getcwd())))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--backend")
    parser.add_argument("--cudagraph-mode", default="FULL_AND_PIECEWISE")
    parser.add_argument("--no-jit-warmup", action="store_true")
    parser.add_argument("--jit-monitor", choices=("warn", "error"))
    parser.add_argument("--profile-memory", action="store_true", help="let vLLM size the KV cache")


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
