"""One engine alone on the GPU, timed: start-up, captures, decode steps, requests per second."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.drivers import engine

BATCHES = (1, 32, 256)
DECODE_STEPS = 64
REQUESTS = 512
REPEATS = 3
ROUNDS = 8

# Wide enough that a decode step is not all launch overhead, small enough to start quickly.
CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def seconds(work: Callable[[], object]) -> float:
    """How long something takes that ends with the GPU idle."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def decode_step(llm: Any, batch: int) -> float:
    """Milliseconds of one decode step: a long answer less a short one, median of the repeats."""
    prompts = [engine.prompt(i, 16) for i in range(batch)]
    times = []
    for _ in range(REPEATS):
        short = seconds(lambda: engine.generate(llm, prompts, 1))
        long = seconds(lambda: engine.generate(llm, prompts, 1 + DECODE_STEPS))
        times.append((long - short) / DECODE_STEPS * 1000)
    return statistics.median(times)


def decode_step_ratio(llm: Any, batch: int) -> float:
    """A decode step with the edited code by one with the stock code, in this one process.

    Processes of one kind differ by more than the plugin could cost. Here the code is swapped
    between measurements, so that all else is the same.
    """
    import vllm_cgfix

    prompts = [engine.prompt(i, 16) for i in range(batch)]
    times: dict[str, list[float]] = {"edited": [], "stock": []}
    for number in range(2 * ROUNDS):
        edited = number % 4 in (0, 3)
        (vllm_cgfix.register if edited else vllm_cgfix.undo)()
        work = seconds(lambda: engine.generate(llm, prompts, 1 + DECODE_STEPS))
        times["edited" if edited else "stock"].append(work)
    vllm_cgfix.register()
    return statistics.median(times["edited"]) / statistics.median(times["stock"])


def requests_per_second(llm: Any) -> float:
    """An offline run of prompts of mixed length, median of the repeats."""
    prompts = [engine.prompt(i, 16 + (37 * i) % 240) for i in range(REQUESTS)]
    return statistics.median(
        REQUESTS / seconds(lambda: engine.generate(llm, prompts, 32)) for _ in range(REPEATS)
    )


def host_memory() -> dict[str, int]:
    """Resident memory of this process, which is the worker, now and at its highest, in MiB."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) // 1024
    return found


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    begin = time.perf_counter()
    engine.prepare(report, shared_gpu=arguments.shared_gpu)
    captures = None
    if arguments.runner == "V2":
        from tests.gpu.drivers.captures import Captures

        captures = Captures(count_calls=False)
    with report.phase("start"):
        llm = engine.make_llm(
            "qwen3",
            config=CONFIG | {"num_hidden_layers": arguments.layers},
            enable_prefix_caching=False,
            folder=os.environ["VLLM_CACHE_ROOT"] + "-model",
            gpu_memory_utilization=0.4,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
        )
    measured: dict[str, Any] = {
        "import and start, s": time.perf_counter() - begin,
        "start, s": report.data["seconds"]["start"],
    }
    memory = host_memory()
    measured["host memory, MiB"] = memory["VmRSS"]
    measured["host memory at most, MiB"] = memory["VmHWM"]
    measured["num_gpu_blocks"] = engine.core(llm).vllm_config.cache_config.num_gpu_blocks
    if captures is not None:
        measured["PIECEWISE capture, s"] = sum(captures.seconds.get("PIECEWISE", []))
        measured["whole capture, s"] = sum(captures.totals)
        measured["graph memory, MiB"] = captures.bytes[-1] / 2**20
        report.put("captures", captures.summary())
    report.put("plugin", engine.plugin_state())
    report.put("measured", measured)
    if arguments.only_start:
        return
    with report.phase("decode"):
        engine.generate(llm, [engine.prompt(i, 16) for i in range(max(BATCHES))], 8)
        for batch in BATCHES:
            measured[f"decode step at {batch}, ms"] = decode_step(llm, batch)
    if report.data["plugin"]:
        with report.phase("decode, edited and stock"):
            for batch in BATCHES:
                name = f"decode step at {batch}, edited / stock in one process"
                measured[name] = decode_step_ratio(llm, batch)
    with report.phase("requests"):
        measured["requests/s"] = requests_per_second(llm)
    report.put("measured", measured)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--runner", choices=("V1", "V2"), required=True)
    parser.add_argument("--only-start", action="store_true")


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
