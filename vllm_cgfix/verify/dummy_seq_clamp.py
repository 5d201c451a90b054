"""Reproduction for the fix ``dummy-seq-clamp``: ``python -m vllm_cgfix.verify.dummy_seq_clamp``.

A row of the block table has room for ``max_model_len`` tokens. Where the bug is, the dummy batch
with which a graph of more tokens is captured has requests that are longer than that, and kernels
read past the end of the row. This runs the real V1 runner on a CPU, with ``max_model_len`` 32.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from . import cpu
from .report import outcome, requirement, run
from .v1_runner import LiveRequest, Probe

MAX_MODEL_LEN = 32
PROMPT = 20

# Nothing in vLLM runs one of this size, so that it is no fault; but a fix must not miss it.
MIXED = "mixed batch of 96 tokens"
# How a graph is captured, and warmed up before: tokens, arguments of _dummy_run, and the lengths
# that its requests have in stock vLLM.
BATCHES: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "FULL graph of 64 tokens": (64, {"cudagraph_runtime_mode": "FULL"}, [64] * 64),
    "warm-up of 64 tokens": (
        64,
        {"cudagraph_runtime_mode": "NONE", "force_attention": True},
        [64] * 64,
    ),
    MIXED: (
        96,
        {
            "cudagraph_runtime_mode": "NONE",
            "force_attention": True,
            "create_mixed_batch": True,
        },
        [1] * 48 + [49],
    ),
    "FULL graph of 32 tokens": (32, {"cudagraph_runtime_mode": "FULL"}, [32] * 32),
    "FULL graph of 4 tokens": (4, {"cudagraph_runtime_mode": "FULL"}, [4] * 4),
    "FULL graph of 64 decodes": (
        64,
        {"cudagraph_runtime_mode": "FULL", "uniform_decode": True},
        [1] * 64,
    ),
}


def reproduce() -> dict[str, Any]:
    """Run dummy batches of the importable vLLM; this process must not have imported it."""
    cpu.use_cpu_platform()
    config = cpu.make_config(max_model_len=MAX_MODEL_LEN)
    with cpu.single_process_group(config):
        probe = Probe(cpu.make_v1_runner(config, "FULL"))
        live = LiveRequest(probe, "live", num_prompt_tokens=PROMPT)
        live.prefill()
        lengths = {name: _lengths(probe, name) for name in BATCHES}
        real = live.decode().seq_lens
    wrong = [
        f"{name}: {found[: len(stock) + 1]}"
        for name, found in lengths.items()
        if (stock := BATCHES[name][2])
        and found != _padded([min(length, MAX_MODEL_LEN) for length in stock], len(found))
    ]
    requirements = [
        requirement("lengths are those of stock vLLM, at most max_model_len, and 0 after", wrong),
        {
            "name": "a real step has the length of its request",
            "ok": real == _padded([PROMPT + 1], len(real)),
            "detail": f"{real[:2]}",
        },
    ]
    longest = {name: max(found) for name, found in lengths.items()}
    faults = [
        f"{name}: a request of {length} tokens, max_model_len is {MAX_MODEL_LEN}"
        for name, length in longest.items()
        if length > MAX_MODEL_LEN and name != MIXED
    ]
    lines = [tabulate(longest.items(), headers=["dummy batch", "longest request"]), ""]
    lines += [f"{'ok ' if r['ok'] else 'NOT'} {r['name']}" for r in requirements]
    return outcome(faults, requirements, {"seq_lens": lengths}, "\n".join(lines))


def _lengths(probe: Probe, name: str) -> list[int]:
    num_tokens, arguments, _ = BATCHES[name]
    mode = cpu.cudagraph_mode(arguments["cudagraph_runtime_mode"])
    return probe.dummy_run(num_tokens, **{**arguments, "cudagraph_runtime_mode": mode}).seq_lens


def _padded(lengths: Sequence[int], size: int) -> list[int]:
    return [*lengths, *[0] * (size - len(lengths))]


if __name__ == "__main__":
    sys.exit(run(__doc__, reproduce))
