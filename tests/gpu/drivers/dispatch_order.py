"""Dummy batches of the V1 runner after every kind of last real step: what they change.

One engine, all scenarios. For each kind of last step and each size that another rank could force,
real requests are brought to that step, the KV cache is copied, ``Worker.execute_dummy_batch`` runs
twice, as on a data-parallel rank with nothing to do, and the cache is compared block by block.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from . import blocks, engine

NUM_BLOCKS = 1031
"""A number that no other dimension of a KV cache has."""
PADDINGS = {"own": None, "8": 8, "64": 64}
"""Tokens to which a busy rank would pad the dummy batch."""
TOKEN_BUDGET = 256
DUMMY_BATCHES = 2
MAX_TOKENS = 10

Prompts = dict[str, list[int]]


def scenarios() -> dict[str, tuple[Prompts, Prompts, str]]:
    """Kind of last step to (prompts that run before, prompts, classification of that step).

    The first prompts are in the prefix cache when the others come. The classification is that of
    :func:`classify`; ``decode`` is only reached after three of them.
    """
    base = engine.prompt(900, 64)
    eight = {f"d{i}": engine.prompt(400 + i, 20) for i in range(8)}
    mixed = {f"m{i}": engine.prompt(500 + i, 20) for i in range(4)}
    return {
        "fresh prefill": ({}, {"a": engine.prompt(100, 100)}, "fresh"),
        "prefill on a cached prefix": (
            {"base": base},
            {"a": base + engine.prompt(200, 40)},
            "cached",
        ),
        "chunked prefill": ({}, {"a": engine.prompt(300, 700)}, "chunk"),
        "decode": ({}, {"a": engine.prompt(350, 40)}, "decode"),
        "decode of 8": ({}, eight, "decode"),
        "mixed": ({}, mixed | {"late": engine.prompt(550, 60)}, "decode+fresh"),
    }


def classify(step: dict[str, tuple[int, int]], lengths: dict[str, int], first: set[str]) -> str:
    """What a step of the model did.

    Args:
        step: request to (tokens computed before, tokens scheduled).
        lengths: request to the length of its prompt.
        first: the requests that this step scheduled for the first time.

    Returns:
        The kinds of its requests, each once, sorted, joined by ``+``: ``fresh`` (a whole prompt),
        ``cached`` (the rest of a prompt, from the prefix cache on), ``chunk`` (a part of a prompt
        that is neither its only nor its last), ``last chunk``, ``decode``.
    """
    kinds = set()
    for request, (computed, scheduled) in step.items():
        length = lengths[request]
        if computed >= length:
            kinds.add("decode")
        elif computed + scheduled < length:
            kinds.add("chunk")
        elif computed == 0:
            kinds.add("fresh")
        else:
            kinds.add("cached" if request in first else "last chunk")
    return "+".join(sorted(kinds))


class Steps:
    """The steps of the model, as its runner is given them."""

    def __init__(self, runner: Any):
        self.lengths: dict[str, int] = {}
        self.seen: set[str] = set()
        self.kinds: list[str] = []
        execute_model = runner.execute_model

        def recording(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = recording

    def _record(self, output: Any) -> None:
        if not output.total_num_scheduled_tokens:
            return
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        step = {
            self._name(request): (computed[request], scheduled)
            for request, scheduled in output.num_scheduled_tokens.items()
        }
        self.kinds.append(classify(step, self.lengths, step.keys() - self.seen))
        self.seen |= step.keys()

    def _name(self, request: str) -> str:
        """A request's own name: later releases add a random suffix."""
        return request if request in self.lengths else request.rpartition("-")[0]


class Requests:
    """Requests of an ``LLMEngine`` that are stepped by hand."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.steps = Steps(engine.runner(llm))
        self.tokens: dict[str, list[int]] = {}
        self._round = 0

    def new_round(self) -> None:
        """Forget everything, the prefix cache included.

        Raises:
            RuntimeError: somebody still holds a block.
        """
        self._round += 1
        # Asynchronous scheduling may have a last batch under way.
        for _ in range(3):
            self.llm.llm_engine.step()
            self.llm.reset_prefix_cache()
            if not blocks.holders(engine.block_pool(self.llm).blocks):
                break
        else:
            raise RuntimeError("the prefix cache cannot be reset")
        self.tokens.clear()
        self.steps.kinds.clear()

    def add(self, prompts: Prompts) -> None:
        """Add requests; their names are unique in a round."""
        for name, tokens in prompts.items():
            request = f"{self._round}-{name}"
            self.steps.lengths[request] = len(tokens)
            self.llm.llm_engine.add_request(
                request, {"prompt_token_ids": tokens}, engine.greedy(MAX_TOKENS)
            )

    def step(self) -> None:
        """One step of the engine."""
        for output in self.llm.llm_engine.step():
            name = output.request_id.partition("-")[2]
            self.tokens[name] = list(output.outputs[0].token_ids)

    def step_until(self, reached: Callable[[list[str]], bool]) -> None:
        """Step until the kinds of the steps so far are as asked.

        Raises:
            RuntimeError: 40 steps did not get there.
        """
        for _ in range(40):
            if reached(self.steps.kinds):
                return
            self.step()
        raise RuntimeError(f"not reached: {self.steps.kinds}")

    def finish(self) -> dict[str, list[int]]:
        """Step until no request is left; the tokens of this round."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()
        return dict(self.tokens)


def bring(requests: Requests, scenario: tuple[Prompts, Prompts, str]) -> None:
    """Bring an engine to the last real step of a scenario."""
    before, prompts, kind = scenario
    requests.new_round()
    requests.add({f"old{i}": engine.prompt(600 + i, 48) for i in range(2)} | before)
    requests.finish()
    requests.steps.kinds.clear()
    if kind == "decode+fresh":
        late = {"late": prompts["late"]}
        requests.add({name: p for name, p in prompts.items() if name not in late})
        requests.step_until(lambda kinds: kinds[-3:] == ["decode"] * 3)
        requests.add(late)
        requests.step_until(lambda kinds: kinds[-1] == kind)
    elif kind == "decode":
        requests.add(prompts)
        requests.step_until(lambda kinds: kinds[-3:] == ["decode"] * 3)
    else:
        requests.add(prompts)
        # The second chunk of a prompt has a first one behind it.
        wanted = [kind, kind] if kind == "chunk" else [kind]
        requests.step_until(lambda kinds: kinds == wanted)


class Contexts:
    """The forward contexts that ``_dummy_run`` makes, and the padding that it is told."""

    def __init__(self, module: Any, runner: Any):
        self.module = module
        self.runner = runner
        self.seen: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def recorded(self, padding: int | None) -> Iterator[None]:
        """Record within, and answer as if another rank ran ``padding`` tokens."""
        stock = self.module.set_forward_context

        def set_forward_context(attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            one = next(iter(attn_metadata.values())) if attn_metadata else None
            self.seen.append(
                {
                    "mode": kwargs["cudagraph_runtime_mode"].name,
                    "metadata": attn_metadata is not None,
                    "num_tokens": kwargs["num_tokens"],
                    "metadata_tokens": getattr(one, "num_actual_tokens", None),
                }
            )
            return stock(attn_metadata, *args, **kwargs)

        self.module.set_forward_context = set_forward_context
        try:
            with contextlib.nullcontext() if padding is None else self._padded(padding):
                yield
        finally:
            self.module.set_forward_context = stock

    @contextlib.contextmanager
    def _padded(self, padding: int) -> Iterator[None]:
        import torch

        if hasattr(self.runner, "_determine_batch_execution_and_padding"):
            # From 0.12 on the dispatcher is asked with what the ranks agreed on.
            stock = self.runner._determine_batch_execution_and_padding

            def determine(**arguments: Any) -> Any:
                return stock(**arguments | {"num_tokens": padding, "num_reqs": padding})

            self.runner._determine_batch_execution_and_padding = determine
            try:
                yield
            finally:
                del self.runner._determine_batch_execution_and_padding
            return
        coordinate = self.module.coordinate_batch_across_dp

        def coordinate_batch_across_dp(*args: Any, **kwargs: Any) -> Any:
            slices, _ = coordinate(*args, **kwargs)
            return slices, torch.tensor([padding])

        self.module.coordinate_batch_across_dp = coordinate_batch_across_dp
        try:
            yield
        finally:
            self.module.coordinate_batch_across_dp = coordinate


def observe(
    requests: Requests, scenario: tuple[Prompts, Prompts, str], padding: int | None, module: Any
) -> dict[str, Any]:
    """One scenario with dummy batches in its midst."""
    llm = requests.llm
    bring(requests, scenario)
    kinds = list(requests.steps.kinds)
    pool = engine.block_pool(llm)
    caches = engine.runner(llm).kv_caches
    held = blocks.holders(pool.blocks)
    before = blocks.snapshot(caches)
    contexts = Contexts(module, engine.runner(llm))
    with contexts.recorded(padding):
        for _ in range(DUMMY_BATCHES):
            engine.worker(llm).execute_dummy_batch()
    after = blocks.snapshot(caches)
    found = blocks.changed(before, after, NUM_BLOCKS)
    observed = {
        "steps": kinds[-4:],
        "held": len(held),
        "changed": len(found),
        "changed_held": blocks.held_changes(found, held),
        "contexts": contexts.seen,
    }
    observed["tokens"] = requests.finish()
    observed["served_from_cache"] = serve_again(requests, scenario[1])
    return observed


def serve_again(requests: Requests, prompts: Prompts) -> dict[str, list[int]]:
    """The tokens of prompts that the prefix cache has by now."""
    requests.add({f"again-{name}": tokens for name, tokens in prompts.items()})
    tokens = requests.finish()
    return {name: tokens[f"again-{name}"] for name in prompts}


def reference(requests: Requests, scenario: tuple[Prompts, Prompts, str]) -> dict[str, Any]:
    """The same without dummy batches, and each prompt uncached."""
    bring(requests, scenario)
    result = {"tokens": requests.finish()}
    result["served_from_cache"] = serve_again(requests, scenario[1])
    requests.new_round()
    result["uncached"] = serve_again(requests, scenario[1])
    return result


def drive(arguments: argparse.Namespace, report: engine.Report) -> None:
    engine.prepare(report, shared_gpu=arguments.shared_gpu)
    with report.phase("start"):
        llm = engine.make_llm(
            "qwen3",
            async_scheduling=arguments.async_scheduling,
            block_size=16,
            compilation_config={"cudagraph_capture_sizes": engine.SMALL_SIZES},
            enable_prefix_caching=True,
            max_num_batched_tokens=TOKEN_BUDGET,
            num_gpu_blocks_override=NUM_BLOCKS,
        )
    from vllm.v1.worker import gpu_model_runner

    report.put("plugin", engine.plugin_state())
    report.put("cudagraph_mode", str(engine.runner(llm).compilation_config.cudagraph_mode))
    report.put("cache", [list(cache.shape) for cache in engine.runner(llm).kv_caches])
    engine.randomize_weights(llm)
    requests = Requests(llm)
    results: dict[str, Any] = {}
    for name, scenario in scenarios().items():
        with report.phase(name):
            results[name] = {"reference": reference(requests, scenario)}
            for label, padding in PADDINGS.items():
                results[name][label] = observe(requests, scenario, padding, gpu_model_runner)
                report.put("scenarios", results)
    hit = [
        f"{name}/{label}"
        for name, result in results.items()
        for label in PADDINGS
        if result[label]["changed_held"]
    ]
    report.put("plugin", engine.plugin_state())
    report.put("summary", f"held blocks changed in {len(hit)} of 18: {', '.join(hit) or 'none'}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--async-scheduling", action="store_true")


if __name__ == "__main__":
    engine.run_driver(__doc__, add_arguments, drive)
