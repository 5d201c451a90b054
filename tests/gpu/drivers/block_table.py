"""Capture with poison behind the block table: what is read past its end shows itself.

A dummy request of the V2 runner is longer than ``max_model_len``: 512 tokens in 300 requests leave
213 to the last, 14 blocks in a row of 4. In the V1 runner each claims 512 tokens, 32 blocks. What
attention reads past the table is whatever memory lies there. Here the table stands at the start
of a larger buffer of block numbers that no cache has.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from . import engine
from .captures import Captures

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 300
LARGEST_SIZE = 512
POISON = 0x7F7F7F7F
BEHIND = 1 << 20
"""Poisoned entries behind the table."""


def poison(table: Any) -> Any:
    """The same table, of zeros, at the start of a poisoned buffer."""
    import torch

    buffer = torch.full((table.numel() + BEHIND,), POISON, dtype=table.dtype, device=table.device)
    moved = buffer[: table.numel()].view(table.shape)
    moved.zero_()
    return moved


def poison_before_capture() -> None:
    """Have the block tables of the V2 runner poisoned when its capture begins, and not before.

    Kernel warm-up runs dummy batches of its own, which are another fault's (`dummy-lengths`).
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    _before_capture(GPUModelRunner, lambda runner: _poison_v2(runner.block_tables))


def poison_when_made() -> None:
    """Have the block tables of the V2 runner poisoned from the start: warm-up reads them, too."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    stock = BlockTables.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _poison_v2(self)

    BlockTables.__init__ = init


def poison_v1_before_capture() -> None:
    """Have the block tables of the V1 runner poisoned when its capture begins."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(runner: Any) -> None:
        for table in runner.input_batch.block_table.block_tables:
            table.block_table.gpu = poison(table.block_table.gpu)

    _before_capture(GPUModelRunner, change)


def _before_capture(kind: type[Any], change: Callable[[Any], None]) -> None:
    stock = kind.capture_model

    @functools.wraps(stock)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        change(self)
        return stock(self, *args, **kwargs)

    kind.capture_model = capture_model


def _poison_v2(tables: Any) -> None:
    tables.input_block_tables = [poison(table) for table in tables.input_block_tables]
    tables.input_block_table_ptrs = tables._make_ptr_tensor(tables.input_block_tables)


POISONED = {
    "capture": poison_before_capture,
    "start": poison_when_made,
    "capture of V1": poison_v1_before_capture,
}


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    engine.prepare(report, shared_gpu=arguments.shared_gpu)
    captures = Captures(count_calls=True)
    POISONED[arguments.poisoned]()
    compilation: dict[str, Any] = {"max_cudagraph_capture_size": LARGEST_SIZE}
    if arguments.cudagraph_mode:
        compilation["cudagraph_mode"] = arguments.cudagraph_mode
    try:
        with report.phase("start"):
            llm = engine.make_llm(
                "qwen3",
                attention_backend=arguments.backend,
                compilation_config=compilation,
                kv_cache_memory_bytes=2 << 30,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=2048,
                max_num_seqs=arguments.max_num_seqs,
            )
    finally:
        report.put("plugin", engine.plugin_state())
        report.put("captures", captures.summary())
    sizes = engine.core(llm).vllm_config.compilation_config.cudagraph_capture_sizes
    report.put("capture_sizes", sorted(sizes))
    report.put("runner", type(engine.runner(llm)).__module__)
    with report.phase("serve"):
        one = engine.generate(llm, [engine.prompt(1, 20)], 8)
        many = engine.generate(llm, [engine.prompt(i, 20) for i in range(MAX_NUM_SEQS)], 8)
    report.put("served", [len(one), len(many)])
    done = {mode: len(sizes) for mode, sizes in captures.sizes.items()}
    report.put("summary", f"captured {done}, served 1 and {MAX_NUM_SEQS}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="FLASH_ATTN")
    parser.add_argument("--cudagraph-mode")
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--poisoned", choices=POISONED, default="capture")


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
