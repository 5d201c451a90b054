"""Two data-parallel ranks with their own GPU each, of which one idles beside the other.

The child of the plan leads: it starts a process for each rank, and merges their reports. A rank has
an ``LLM`` with its engine core in a process of its own, whose loop runs the dummy batches. Both
ranks always have a request of their own at the same time: without a coordinator an engine joins a
wave of steps by its own requests only, and would leave the other waiting.

A wave ends at a multiple of 32 steps, so that ranks idle after every answer, and one of them beside
the other for hundreds of steps where their answers differ in length.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import blocks, engine

MODULE = f"{__package__}.{Path(__file__).stem}"
"""The name of this module where it is not ``__main__``."""
RANKS = 2
NUM_BLOCKS = 1031
"""A number that no other dimension of a KV cache has."""
TOKEN_BUDGET = 256
KEPT = (40, 48, 100, 200)
"""Lengths of the prompts that are served, and then kept by the prefix cache."""
FRESH = (96, 60)
"""Lengths of the prompts whose prefill is the idle rank's last step."""
MAX_TOKENS = 16
LONG, SHORTER = 256, 100
"""Tokens of the busy rank's answers: a single one, and five at once."""
ALONE, FILL, IDLE, IDLE_PADDED, AGAIN = PHASES = (
    "each alone",
    "fill the cache",
    "idle beside 1",
    "idle beside 5",
    "serve again",
)
COORDINATION = "vllm.v1.worker.dp_utils"
"""The module in which ranks agree on the size of a batch."""
PATIENCE = 10
"""Seconds that the other rank has to end after one that ended badly."""
WARM = 20
"""Steps at the start of a phase that do not count for its speed."""


@dataclass(frozen=True)
class Wave:
    """What one rank is asked for at a time.

    Attributes:
        prompts: all at once.
        max_tokens: the length of each answer.
        forget: whether the prefix cache is emptied before.
    """

    prompts: tuple[list[int], ...]
    max_tokens: int = MAX_TOKENS
    forget: bool = False


def prompts(rank: int) -> list[list[int]]:
    """The prompts of a rank; those of :data:`FRESH` come last."""
    return [engine.prompt(100 * rank + n, length) for n, length in enumerate(KEPT + FRESH)]


def work(rank: int) -> dict[str, list[Wave]]:
    """What a rank does: phase to its waves, of which both ranks have the same number.

    Rank 0 is the busy one, rank 1 the one that idles.
    """
    kept, fresh = prompts(rank)[: len(KEPT)], prompts(rank)[len(KEPT) :]
    busy = rank == 0
    beside = [engine.prompt(500 + n, 40) for n in range(4)] if busy else []
    alone = []
    for prompt in kept + fresh:
        uncached = Wave((prompt,), forget=True)
        alone += [uncached, uncached, Wave((prompt,))]
    return {
        ALONE: alone,
        FILL: [Wave((prompt,), forget=n == 0) for n, prompt in enumerate(kept)],
        IDLE: [Wave((fresh[0],), LONG if busy else 1)],
        IDLE_PADDED: [Wave((fresh[1], *beside), SHORTER if busy else 1)],
        AGAIN: [Wave((prompt,)) for prompt in kept + fresh],
    }


# --- in the process of the engine core ------------------------------------------------------------


def engine_core() -> Any:
    """The ``EngineCore`` that has called, by whatever way; None where it is another process's.

    The garbage collector does not know it: vLLM freezes what it has made at its start.
    """
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "scheduler") and hasattr(caller, "model_executor"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Observer:
    """What a rank's worker is asked to do, and what its dummy batches leave behind.

    The dummy batches between two real steps are a stretch: the KV cache is copied before the first
    of them, and compared before the next real step or at the end of the phase.
    """

    def __init__(self, worker: Any, pool: Any, runner_module: Any):
        self._runner = worker.model_runner
        self._pool = pool
        self._module = runner_module
        self._before: tuple[dict[int, str], list[Any]] | None = None
        self._calls: Counter[str] = Counter()
        self.begin()
        worker.execute_model = self._real(worker.execute_model)
        worker.execute_dummy_batch = self._dummy(worker.execute_dummy_batch)

    def begin(self) -> None:
        """A new phase."""
        self._times: list[float] = []
        self._dummies = self._stretches = self._held = 0
        self._contexts: Counter[str] = Counter()
        self._changed: dict[str, str] = {}
        self._calls.clear()

    def end(self) -> dict[str, Any]:
        """What was seen in this phase."""
        self._compare()
        steady = self._times[WARM:]
        return {
            "real": len(self._times),
            "dummy": self._dummies,
            "stretches": self._stretches,
            "held": self._held,
            "changed_held": self._changed,
            "contexts": dict(self._contexts),
            "all_reduce": dict(self._calls),
            "steps_per_second": (
                round((len(steady) - 1) / (steady[-1] - steady[0]), 2) if len(steady) > 1 else None
            ),
        }

    def count_calls(self, module: Any, name: str) -> None:
        """Count the calls of a function, by the module that calls it as ``module.name``."""
        stock = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[sys._getframe(1).f_globals["__name__"]] += 1
            return stock(*args, **kwargs)

        setattr(module, name, counted)

    def _real(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            # A step of no tokens only tells the worker of requests that have ended.
            if output.total_num_scheduled_tokens:
                self._compare()
                self._times.append(time.perf_counter())
            return stock(output, *args, **kwargs)

        return execute_model

    def _dummy(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
            if self._before is None:
                held = blocks.holders(self._pool.blocks)
                self._before = held, blocks.snapshot(self._runner.kv_caches)
                self._stretches += 1
                self._held = max(self._held, len(held))
            self._dummies += 1
            given = self._module.set_forward_context
            self._module.set_forward_context = self._context(given)
            try:
                return stock(*args, **kwargs)
            finally:
                self._module.set_forward_context = given

        return execute_dummy_batch

    def _context(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def set_forward_context(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            mode, size = kwargs["cudagraph_runtime_mode"].name, kwargs["num_tokens"]
            self._contexts[f"{mode} {size} {'without' if metadata is None else 'with'}"] += 1
            return stock(metadata, *args, **kwargs)

        return set_forward_context

    def _compare(self) -> None:
        if self._before is None:
            return
        held, before = self._before
        self._before = None
        found = blocks.changed(before, blocks.snapshot(self._runner.kv_caches), NUM_BLOCKS)
        self._changed |= blocks.held_changes(found, held)


class Watched:
    """What vLLM adds to the ``Worker`` (``worker_extension_cls``), to be called by name."""

    model_runner: Any

    def cgfix_watch(self) -> dict[str, Any]:
        """Make the weights random, and observe from now on; what this process is."""
        import torch.distributed
        from vllm.v1.worker import gpu_model_runner

        # For the leader to ask where a hang is.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        engine.randomize(self.model_runner.model)
        core = engine_core()
        assert core is not None, "the worker must live in the process of the engine core"
        pool = core.scheduler.kv_cache_manager.block_pool
        self._observer = Observer(self, pool, gpu_model_runner)
        self._observer.count_calls(torch.distributed, "all_reduce")
        return {
            "pid": os.getpid(),
            "core": type(core).__name__,
            "device": str(self.model_runner.device),
            "cudagraph_mode": str(self.model_runner.compilation_config.cudagraph_mode),
            "cache": [list(cache.shape) for cache in self.model_runner.kv_caches],
        }

    def cgfix_begin(self) -> None:
        """A new phase."""
        self._observer.begin()

    def cgfix_end(self) -> dict[str, Any]:
        """What was seen in this phase, and what the plugin says."""
        return self._observer.end() | {"plugin": engine.plugin_state()}


# --- a rank ---------------------------------------------------------------------------------------


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``make_llm``."""
    chosen: dict[str, Any] = {
        "model": "moe",
        "block_size": 16,
        "compilation_config": {
            "cudagraph_capture_sizes": engine.SMALL_SIZES,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
        },
        "enable_expert_parallel": True,
        "enable_prefix_caching": True,
        # vLLM's own measure would fail where others use the GPUs as well.
        "kv_cache_memory_bytes": 1 << 30,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "worker_extension_cls": f"{MODULE}.{Watched.__name__}",
    }
    if arguments.cpu:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        # vLLM takes the model for a mixture of experts, whose ranks march in step: its CPU
        # communicator has nothing for the real thing. And on a CPU it would not ask for "uni".
        chosen |= {
            "model": "llama",
            "block_size": 32,
            "config": {"num_experts": 4},
            "distributed_executor_backend": UniProcExecutor,
            "dtype": "float32",
            "enable_expert_parallel": False,
            "enforce_eager": True,
        }
        del chosen["compilation_config"]
    return chosen


def meet(folder: Path, rank: int, where: str) -> None:
    """Wait until every rank has come here."""
    (folder / f"{where}.{rank}").touch()
    while not all((folder / f"{where}.{other}").exists() for other in range(RANKS)):
        time.sleep(0.02)


def serve(llm: Any, wave: Wave) -> list[Any]:
    """Serve a wave to its end, which is the end of the other rank's, too."""
    if wave.forget:
        llm.reset_prefix_cache()
    requests = [{"prompt_token_ids": prompt} for prompt in wave.prompts]
    return llm.generate(requests, engine.greedy(wave.max_tokens), use_tqdm=False)


def be_a_rank(arguments: argparse.Namespace, report: engine.Report) -> None:
    """Start an engine, and do what :func:`work` says."""
    folder, rank = arguments.folder, arguments.rank
    with engine.Watchdog(report, arguments.start).over("start"):
        engine.prepare(report, shared_gpu=False)
        with report.phase("start"):
            # In a place of its own: both ranks write the model.
            chosen = settings(arguments) | {"folder": folder / f"model{rank}"}
            llm = engine.make_llm(chosen.pop("model"), **chosen)
        report.put("process", llm.collective_rpc("cgfix_watch")[0])
    watchdog = engine.Watchdog(report, arguments.watchdog)
    tokens: dict[str, Any] = {}
    from_cache: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for name, waves in work(rank).items():
        with report.phase(name), watchdog.over(name):
            llm.collective_rpc("cgfix_begin")
            meet(folder, rank, name)
            done = [serve(llm, wave) for wave in waves]
            tokens[name] = [[list(each.outputs[0].token_ids) for each in wave] for wave in done]
            from_cache[name] = [[each.num_cached_tokens for each in wave] for wave in done]
            seen[name] = llm.collective_rpc("cgfix_end")[0]
            report.put("tokens", tokens)
            report.put("from_cache", from_cache)
            report.put("phases", seen)
    # An engine that ends breaks the collectives of the other.
    with watchdog.over("end"):
        meet(folder, rank, "end")
    report.put("summary", f"{seen[IDLE]['dummy']} dummy batches beside 1")


# --- the leader -----------------------------------------------------------------------------------


def rank_environment(rank: int, port: int) -> dict[str, str]:
    """The environment of a rank.

    Args:
        rank: 0 or 1. Both see all GPUs, of which the local rank chooses one.
        port: the first of 50 that are this pair's.
    """
    return os.environ | {
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        # A port within 10 of the master's is one that vLLM passes over.
        "VLLM_DP_MASTER_PORT": str(port + 40),
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PORT": str(port + 15 * rank),
        # A watchdog is a thread, and not to be forked.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait for all ranks; where one ends badly the others have a while, then are ended.

    In that while the other rank reports a hang that both are in, and no more: left to its own
    watchdog it would take the end of the first for a hang.

    Returns:
        The exit code of each; None for one that was ended here.
    """
    deadline = float("inf")
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            break
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            process.kill()
            process.wait()
    return codes


def ask_where(pids: Iterable[int]) -> None:
    """Have processes write where they are."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    # For them to write it, before whoever started this ends them all.
    time.sleep(2)


def merge(reports: list[dict[str, Any]], codes: list[int | None]) -> dict[str, Any]:
    """What the ranks reported, as one: ``ranks``, and ``hang`` or ``problem`` if there is any."""
    merged: dict[str, Any] = {"ranks": reports, "codes": codes}
    hangs = [f"rank {n}: {report['hang']}" for n, report in enumerate(reports) if "hang" in report]
    if hangs:
        merged["hang"] = "; ".join(hangs)
    problems = [
        f"rank {n}: {report.get('error', f'exit code {code}')} in phase {report.get('phase')!r}"
        for n, (report, code) in enumerate(zip(reports, codes, strict=True))
        if code
    ]
    if problems:
        merged["problem"] = "; ".join(problems)
    elif None in codes:
        merged["problem"] = "a rank was ended"
    return merged


def lead(arguments: argparse.Namespace, report: engine.Report) -> None:
    """Start the ranks, wait for both, and report what they did.

    Raises:
        RuntimeError: a rank did not come to its own end.
    """
    folder = report.path.parent / "ranks"
    folder.mkdir()
    port = int(os.environ.get("VLLM_PORT", "21000"))
    files = [folder / f"report{rank}.json" for rank in range(RANKS)]
    processes = []
    with report.phase("ranks"):
        for rank, file in enumerate(files):
            command = [sys.executable, "-P", "-m", MODULE]
            command += ["--rank", str(rank), "--folder", str(folder), "--report", str(file)]
            command += ["--start", str(arguments.start), "--watchdog", str(arguments.watchdog)]
            command += ["--cpu"] if arguments.cpu else []
            processes.append(
                subprocess.Popen(
                    command, env=rank_environment(rank, port), stdin=subprocess.DEVNULL
                )
            )
        codes = wait(processes)
    reports = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    merged = merge(reports, codes)
    for key, value in merged.items():
        report.put(key, value)
    report.put("shared_gpu", arguments.shared_gpu)
    if "hang" in merged:
        ask_where(found["process"]["pid"] for found in reports if "process" in found)
    if "hang" in merged or "problem" in merged:
        raise RuntimeError(merged.get("hang") or merged["problem"])
    report.put("summary", summary(reports))


def summary(reports: list[dict[str, Any]]) -> str:
    """One line on two ranks that came to their ends."""
    changed = sum(len(found["changed_held"]) for r in reports for found in r["phases"].values())
    idle, busy = reports[1]["phases"][IDLE], reports[0]["phases"][IDLE]
    return (
        f"{idle['dummy']} dummy batches beside {busy['real']} steps of "
        f"{busy['steps_per_second']} a second; {changed} held blocks changed"
    )


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    if arguments.rank is None:
        lead(arguments, report)
    else:
        be_a_rank(arguments, report)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU")
    parser.add_argument("--start", type=float, default=240, help="seconds until engines serve")
    parser.add_argument("--watchdog", type=float, default=120, help="seconds for a phase")
    parser.add_argument("--rank", type=int, help="be this rank (set by the leader)")
    parser.add_argument("--folder", type=Path, help="where ranks meet (set by the leader)")


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
