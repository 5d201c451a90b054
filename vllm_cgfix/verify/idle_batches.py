"""Idle batches: what a data-parallel rank with nothing to do runs beside ranks that work.

:func:`observe_idle_batches` runs them on the real V1 runner, after real steps of a live request,
and :func:`main` is what the reproductions of the fixes for dummy batches share: each brings its
scenarios, how its fault shows in one batch, and what must hold of every batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from . import cpu
from .report import outcome, requirement, run
from .v1_runner import ForwardPass, LiveRequest, Probe, as_dict

PADDED_TO = (1, 8, 64)

Check = Callable[["IdleBatch"], "str | None"]
"""Says what is wrong with an idle batch; None if nothing is."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kind of runner, and the idle batches it is observed with.

    The last real step before an idle batch is a "prefill" or a "decode" of one request, or a
    "condensing decode": another request has finished before it, and the one that is left moves to
    the first row of the batch.
    """

    name: str
    mode: str = "FULL_DECODE_ONLY"
    max_num_seqs: int = 64
    uniform_decode_query_len: int = 1
    kv_cache_groups: int = 1
    microbatches: bool = False
    last_steps: tuple[str, ...] = ("decode",)
    padded_to: tuple[int, ...] = PADDED_TO


@dataclasses.dataclass
class IdleBatch:
    """One idle batch: where it ran, its forward pass, and the pass that captured its graph.

    ``capture`` is None when no FULL graph was dispatched. ``live_reqs``: requests in the runner's
    persistent batch, in its first rows. ``live_blocks_kept``: the host's block
    tables are as before. ``next_step_kept``: the next real step prepares what it would have
    prepared without the dummy batch. ``stock_collectives``: how often a stock release asks the
    other ranks; a rank that asked more or less often would leave them waiting.
    """

    scenario: str
    last_step: str
    padded_to: int
    forward: ForwardPass
    capture: ForwardPass | None
    live_reqs: int
    live_blocks_kept: bool
    next_step_kept: bool
    next_step: dict[str, Any]
    stock_collectives: int

    def __str__(self) -> str:
        padding = "alone" if self.padded_to == 1 else f"padded to {self.padded_to}"
        return f"{self.scenario}, after a {self.last_step}, {padding}"


def observe_idle_batches(scenario: Scenario) -> list[IdleBatch]:
    """An idle batch after each kind of real step, for each size that another rank may have."""
    with open_probe(scenario) as probe:
        capture = _Captures(probe, scenario)
        return [
            _observe_idle_batch(probe, scenario, capture, last_step, padded_to)
            for last_step in scenario.last_steps
            for padded_to in scenario.padded_to
        ]


def _observe_idle_batch(
    probe: Probe, scenario: Scenario, captures: _Captures, last_step: str, padded_to: int
) -> IdleBatch:
    undisturbed = _live_request(probe, "undisturbed", last_step)
    expected = undisturbed.decode().inputs()
    undisturbed.finish()

    live = _live_request(probe, "live", last_step)
    blocks = _host_block_tables(probe)
    live_reqs = probe.runner.input_batch.num_reqs
    # Two microbatches need a batch of their own that is large enough to be split.
    num_tokens = padded_to if scenario.microbatches else 1
    with probe.input_preparation_event(), probe.busy_rank(padded_to):
        forward = probe.dummy_run(num_tokens, uniform_decode=True)
    live_blocks_kept = _host_block_tables(probe) == blocks
    next_step = live.decode().inputs()
    live.finish()
    return IdleBatch(
        scenario=scenario.name,
        last_step=last_step,
        padded_to=padded_to,
        forward=forward,
        capture=captures.of(forward),
        live_reqs=live_reqs,
        live_blocks_kept=live_blocks_kept,
        next_step_kept=next_step == expected,
        next_step=next_step,
        stock_collectives=2 if scenario.microbatches and probe.agrees_on_microbatches_first else 1,
    )


def _live_request(probe: Probe, req_id: str, last_step: str) -> LiveRequest:
    request = LiveRequest(probe, req_id)
    if last_step == "condensing decode":
        neighbour = LiveRequest(probe, f"neighbour of {req_id}", num_prompt_tokens=20, place=1)
        neighbour.prefill()
        request.prefill(beside=neighbour)
        request.decode(finished=neighbour)
        return request
    request.prefill()
    if last_step == "decode":
        request.decode()
    return request


def _host_block_tables(probe: Probe) -> list[Any]:
    return [
        (
            table.block_table_cpu if hasattr(table, "block_table_cpu") else table.block_table.cpu
        ).tolist()  # 0.10.2 has no CpuGpuBuffer here
        for table in probe.runner.input_batch.block_table.block_tables
    ]


class _Captures:
    """The forward pass that captures each graph, recorded before any request is live."""

    def __init__(self, probe: Probe, scenario: Scenario) -> None:
        self._passes: dict[tuple[int, bool], ForwardPass] = {}
        for num_tokens, uniform in _full_graphs(probe):
            with contextlib.ExitStack() as stack:
                if scenario.microbatches:
                    stack.enter_context(probe.busy_rank(num_tokens))
                self._passes[num_tokens, uniform] = probe.dummy_run(
                    num_tokens,
                    cudagraph_runtime_mode=cpu.cudagraph_mode("FULL"),
                    uniform_decode=uniform,
                )

    def of(self, forward: ForwardPass) -> ForwardPass | None:
        if forward.mode != "FULL" or forward.descriptor is None:
            return None
        return self._passes[forward.descriptor["num_tokens"], _is_uniform(forward.descriptor)]


def _full_graphs(probe: Probe) -> list[tuple[int, bool]]:
    keys = probe.runner.cudagraph_dispatcher.cudagraph_keys[cpu.cudagraph_mode("FULL")]
    return sorted((key.num_tokens, _is_uniform(as_dict(key))) for key in keys)


def _is_uniform(descriptor: dict[str, Any]) -> bool:
    # "uniform_decode" up to 0.11
    return bool(descriptor.get("uniform", descriptor.get("uniform_decode")))


@contextlib.contextmanager
def open_probe(scenario: Scenario) -> Iterator[Probe]:
    """A probe of a runner of this kind."""
    config = cpu.make_config(max_num_seqs=scenario.max_num_seqs)
    config.parallel_config.enable_dbo = scenario.microbatches
    with cpu.single_process_group(config):
        yield Probe(
            cpu.make_v1_runner(
                config,
                scenario.mode,
                uniform_decode_query_len=scenario.uniform_decode_query_len,
                kv_cache_groups=scenario.kv_cache_groups,
            )
        )


def unprotected(events: list[str]) -> str | None:
    """What was written to pinned buffers outside of synchronize and record; None if nothing."""
    depth, protected = 0, 0
    for event in events:
        if event == "synchronize":
            depth += 1
        elif event == "record":
            depth -= 1
        elif depth < 1:
            return f"{event} outside synchronize and record"
        else:
            protected += 1
    return None if protected else "the pinned buffers are not written"


def tokens_of(capture: ForwardPass) -> int:
    """Tokens of the graph that was captured."""
    assert capture.descriptor is not None
    return int(capture.descriptor["num_tokens"])


def shortened(numbers: list[int], length: int = 6) -> str:
    """The first of the numbers, for a table."""
    more = ", ..." if len(numbers) > length else ""
    return f"[{', '.join(map(str, numbers[:length]))}{more}]"


# What must hold of every idle batch, whatever a fix does.


def live_request_untouched(batch: IdleBatch) -> str | None:
    """The host's block table, and the inputs of the next real step."""
    if not batch.live_blocks_kept:
        return "the host's block table has changed"
    return None if batch.next_step_kept else "the next real step prepares other inputs"


def stock_collectives(batch: IdleBatch) -> str | None:
    """A rank that asked the others more or less often would leave them waiting."""
    count = batch.forward.collectives
    return None if count == batch.stock_collectives else f"{count}, not {batch.stock_collectives}"


def next_step_has_its_slots(batch: IdleBatch) -> str | None:
    """The slots that a dummy batch must not have are those that a real step needs."""
    lacking = [slots for slots in batch.next_step["slot_mapping"] if min(slots) < 0]
    return f"slots by KV cache group: {lacking}" if lacking else None


COMMON_REQUIREMENTS: dict[str, Check] = {
    "collectives are as many as in stock vLLM": stock_collectives,
    "the live request is untouched": live_request_untouched,
    "the next real step has its slots": next_step_has_its_slots,
}


def main(
    description: str,
    fault: Check,
    requirements: Mapping[str, Check],
    *,
    scenarios: Sequence[Scenario],
    elsewhere: Callable[[], Sequence[str]] = tuple,
) -> int:
    """Observe idle batches, print what was found, and return the exit code.

    Args:
        description: of the reproduction.
        fault: how the fault shows in one idle batch.
        requirements: what must hold of every idle batch once the fix is applied, beside
            :data:`COMMON_REQUIREMENTS`.
        scenarios: the kinds of runners, and the idle batches on each.
        elsewhere: finds the fault beyond the V1 runner's idle batches.
    """

    def reproduce() -> dict[str, Any]:
        """Observe with the importable vLLM; this process must not have imported it."""
        cpu.use_cpu_platform()
        batches = [b for scenario in scenarios for b in observe_idle_batches(scenario)]
        found = _judge(batches, fault, requirements)
        found["faults"] += elsewhere()
        return found

    return run(description, reproduce)


def _judge(
    batches: Sequence[IdleBatch], fault: Check, requirements: Mapping[str, Check]
) -> dict[str, Any]:
    results = []
    for name, check in {**requirements, **COMMON_REQUIREMENTS}.items():
        wrong = [f"{batch}: {detail}" for batch in batches if (detail := check(batch))]
        results.append(requirement(name, wrong))
    found = {str(batch): fault(batch) for batch in batches}
    rows = [
        [str(batch), batch.forward.mode, found[str(batch)] or "nothing wrong"] for batch in batches
    ]
    lines = [tabulate(rows, headers=["idle batch", "mode", "found"]), ""]
    lines += [f"{'ok ' if result['ok'] else 'NOT'} {result['name']}" for result in results]
    return outcome(
        [f"{batch}: {detail}" for batch, detail in found.items() if detail],
        results,
        {"idle_batches": [dataclasses.asdict(batch.forward) for batch in batches]},
        "\n".join(lines),
    )
