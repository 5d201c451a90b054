"""Look, for a bounded time, for the hang that the reviewers of PR 27382 feared with FlashInfer.

Long contexts and many sequences leave large plans behind; dummy batches then replay FULL graphs,
on their own size and on those of busy ranks. A watchdog ends the process where a batch does not.
"""

from __future__ import annotations

import argparse
import time

from . import engine
from .dispatch_order import Contexts

LOADS = {
    "64 x 12000 tokens": (64, 12000),
    "1 x 32000 tokens": (1, 32000),
    "64 x 100 tokens": (64, 100),
    "8 x 4000 tokens": (8, 4000),
    "1 x 10 tokens": (1, 10),
}
DUMMY_BATCHES = 10


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    engine.prepare(report, shared_gpu=arguments.shared_gpu)
    with report.phase("start"):
        llm = engine.make_llm(
            "qwen3",
            block_size=16,
            compilation_config={"cudagraph_capture_sizes": engine.SMALL_SIZES},
            gpu_memory_utilization=0.15,
            kv_cache_memory_bytes=8 << 30,
            max_model_len=32768,
            max_num_batched_tokens=8192,
        )
    import torch
    from vllm.v1.worker import gpu_model_runner

    report.put("plugin", engine.plugin_state())
    requests = llm.llm_engine
    watchdog = engine.Watchdog(report, arguments.watchdog)
    contexts = Contexts(gpu_model_runner, engine.runner(llm))
    done: list[str] = []
    begin = time.monotonic()

    def dummy_batches(when: str) -> None:
        for padding in (None, 8, 64):
            what = f"{when}, dummy batches of {padding or 'their own size'}"
            with watchdog.over(what), contexts.recorded(padding):
                for _ in range(DUMMY_BATCHES):
                    engine.worker(llm).execute_dummy_batch()
                torch.cuda.synchronize()
            done.append(what)

    rounds = 0
    while time.monotonic() - begin < arguments.seconds:
        rounds += 1
        for load, (count, length) in LOADS.items():
            if time.monotonic() - begin > arguments.seconds:
                break
            names = [f"{rounds}-{load}-{i}" for i in range(count)]
            for i, name in enumerate(names):
                requests.add_request(
                    name,
                    {"prompt_token_ids": engine.prompt(1000 * rounds + i, length)},
                    engine.greedy(64),
                )
            steps = -(-count * length // 8192) + 8
            with report.phase(f"round {rounds}, {load}"), watchdog.over(f"{load}, real steps"):
                for step in range(steps):
                    requests.step()
                    if step == 2:
                        dummy_batches(f"{load}, in the midst of prefill")
                torch.cuda.synchronize()
            dummy_batches(f"{load}, after decode")
            requests.abort_request(names)
            dummy_batches(f"{load}, after all requests were aborted")
            report.put("done", len(done))
    full = [c for c in contexts.seen if c["mode"] == "FULL"]
    report.put("full_replays", len(full))
    report.put("full_replays_without_metadata", sum(not c["metadata"] for c in full))
    report.put(
        "summary",
        f"no hang in {rounds} rounds, {len(full)} FULL dummy replays, "
        f"{time.monotonic() - begin:.0f} s",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--watchdog", type=float, default=60)


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
