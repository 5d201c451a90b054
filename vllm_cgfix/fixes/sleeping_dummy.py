"""``sleeping-dummy``: no dummy batch while the memory of the engine is released.

``sleep`` releases the memory of weights and KV cache, and ``wake_up`` with ``tags`` takes back a
part of it: a trainer wakes the weights, writes into them, and wakes the KV cache later. Up to
0.23.0 the busy loop of a data-parallel engine knows nothing of that. A rank without work of its
own runs a dummy batch as long as any rank is at work, asleep or not, and touches memory that is
not mapped: an illegal memory access.

As in 0.24.0 (PR 44483):

* the busy loop runs no dummy batch while the executor sleeps, wholly or in part. The rest of its
  turn is as before: the ranks still ask each other for unfinished work, equally often;
* ``wake_up`` resumes the scheduler when everything is awake. In 0.17.0 to 0.23.0, where ``sleep``
  pauses the scheduler, the first partial ``wake_up`` resumed it, which let real steps and new
  waves of dummy batches run without a KV cache.

A rank that skips its dummy batch leaves out the collectives of its forward pass, too. That is
right because all data-parallel ranks sleep and wake together, on which upstream relies: vLLM's
clients send both calls to every engine. Ranks that do so in different turns of a wave wait for
each other for ever, where stock vLLM crashes. That happens

* up to 0.16.0, where ``sleep`` does not wait for the end of a wave: if a turn of the loop begins
  between its arrival at one rank and at another;
* up to 0.20.2, if an engine is sent a request while it sleeps: that starts a wave on the others.

From 0.21.0 on it does not: all ranks pause in the same turn, and a paused engine joins no wave.

Left as they are, here as upstream: steps of real requests that up to 0.16.0 nothing holds back
during a sleep, and the dummy batches that ``LLMEngine.step`` runs for offline data parallelism.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Guard, OneOf, Unchanged
from ..fix import Fix

_AWAKE = "not self.model_executor.is_sleeping"


def _busy_loop(dummy_batch: str) -> tuple[EditFunction]:
    guard = Guard(
        dummy_batch,
        condition=_AWAKE,
        after="if not local_unfinished_reqs and not self.engines_running:\n    continue",
    )
    return (EditFunction("DPEngineCoreProc.run_busy_loop", (guard,)),)


_RESUME = Guard(
    "self.resume_scheduler()",
    condition=_AWAKE,
    after=(
        "if tags is not None and 'scheduling' in tags:\n"
        "    tags = [t for t in tags if t != 'scheduling']\n"
        "if tags is None or tags:\n"
        "    self.model_executor.wake_up(tags)"
    ),
)

FIX = Fix(
    id="sleeping-dummy",
    title="no dummy batch runs and no scheduler is resumed while the engine sleeps",
    symptom=(
        "illegal memory access in `execute_dummy_batch` while the engine sleeps, or after a "
        'partial wake-up such as `wake_up(tags=["weights"])` (RL rollouts)'
    ),
    error_patterns=(
        r"execute_dummy_batch",
        r"wake_?up\(tags",
        r"illegal (memory access|address).*\b(asleep|sleep(s|ing)?|wak(es?|ing|e_up))\b",
        r"\b(asleep|sleep(s|ing)?|wak(es?|ing|e_up))\b.*illegal (memory access|address)",
    ),
    upstream=("PR 44483",),
    scope="engine core",
    releases=(
        *("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1"),
        *("0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0"),
        *("0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0"),
    ),
    edits={
        "vllm.v1.engine.core": (
            OneOf(
                (
                    _busy_loop("self.execute_dummy_batch()"),
                    _busy_loop(  # 0.23.0
                        "with self.log_iteration_details(None):\n    self.execute_dummy_batch()"
                    ),
                )
            ),
            OneOf(
                (
                    (EditFunction("EngineCore.wake_up", (_RESUME,)),),
                    # Up to 0.16.0 sleep and wake_up leave the scheduler alone.
                    (Unchanged("EngineCore.wake_up", "self.model_executor.wake_up(tags)"),),
                )
            ),
        ),
    },
    # Where is_sleeping is kept.
    witnesses=("vllm/executor/executor_base.py", "vllm/v1/executor/abstract.py"),
)
