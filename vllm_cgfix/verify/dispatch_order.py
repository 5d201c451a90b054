"""Reproduction for the fix ``dispatch-order``: ``python -m vllm_cgfix.verify.dispatch_order``.

A data-parallel rank with nothing to do runs ``_dummy_run(1, uniform_decode=True)`` beside ranks
that work. Where the bug is, it replays a FULL graph without attention metadata, on what the last
real step left in the persistent buffers. This runs the real V1 runner on a CPU, in one process,
with whichever vLLM is importable, and reports what its dummy batches put in front of the model.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from . import cpu
from .idle_batches import (
    IdleBatch,
    Scenario,
    live_request_untouched,
    observe_idle_batches,
    open_probe,
    shortened,
    stock_collectives,
    tokens_of,
    unprotected,
)
from .report import outcome, requirement, run
from .v1_runner import ForwardPass, Plan

MISSING_METADATA = "FULL graph replayed without attention metadata"
# The releases that the fix is for.
FIXED_RELEASES = "0.11."


# The bug and its absence show here on every release.
DECODE_GRAPHS = Scenario("decode graphs", last_steps=("prefill", "decode"))
# What only a fix can get wrong; also, the other releases refuse some of these settings.
FURTHER_SCENARIOS = (
    Scenario("decode graphs beside piecewise ones", mode="FULL_AND_PIECEWISE"),
    # Fewer sequences than the largest size: its requests have several tokens each.
    Scenario("mixed graphs", mode="FULL", max_num_seqs=16),
    Scenario("speculative decoding", uniform_decode_query_len=3),
    Scenario("two KV cache groups", kv_cache_groups=2),
    Scenario("microbatches", microbatches=True, padded_to=(64,)),
)

# What section 1 of the evidence tabulates: how the mode is given, and what reaches the model.
MODES: dict[str, dict[str, Any]] = {
    "mode not given": {},
    "mode NONE": {"cudagraph_runtime_mode": "NONE"},
    "mode NONE, force_attention": {"cudagraph_runtime_mode": "NONE", "force_attention": True},
    "mode FULL": {"cudagraph_runtime_mode": "FULL"},
    "is_profile": {"is_profile": True},
}


def observe() -> dict[str, Any]:
    """Run everything; the result is what ``--json`` prints.

    Returns:
        The keys of :class:`vllm_cgfix.verify.Outcome`. ``observations`` has ``modes``,
        ``idle_batches`` and ``nested_event``.
    """
    cpu.use_cpu_platform()
    version = cpu.vllm_version()
    further = FURTHER_SCENARIOS if version.startswith(FIXED_RELEASES) else ()
    modes = observe_modes()
    batches = [
        batch for scenario in (DECODE_GRAPHS, *further) for batch in observe_idle_batches(scenario)
    ]
    nested = observe_nested_event()
    # Elsewhere they are the business of other fixes.
    requirements = check_requirements(batches, nested) if further else []
    observations = {
        "modes": [{"call": call, **_summary(forward)} for call, forward in modes.items()],
        "idle_batches": [_row(batch) for batch in batches],
        "nested_event": nested,
    }
    text = _table(observations, requirements)
    return outcome(find_faults(modes, batches), requirements, observations, text)


def observe_modes() -> dict[str, ForwardPass]:
    """``_dummy_run(4)`` for each way to give the mode, with FULL graphs for mixed batches."""
    with open_probe(Scenario("modes", mode="FULL")) as probe:
        return {
            call: probe.dummy_run(4, **_with_mode(arguments)) for call, arguments in MODES.items()
        }


def observe_nested_event() -> list[str] | None:
    """The event's log for a dummy batch inside ``synchronize_input_prep``, as the external
    launcher runs it from 0.11.1 on. None where the runner has no such method (0.10.2)."""
    with open_probe(Scenario("nested event")) as probe:
        if not hasattr(probe.runner, "synchronize_input_prep"):
            return None
        with probe.input_preparation_event(), probe.runner.synchronize_input_prep():
            forward = probe.dummy_run(1, uniform_decode=True)
        return forward.events  # with the outer record


def _with_mode(arguments: dict[str, Any]) -> dict[str, Any]:
    if "cudagraph_runtime_mode" not in arguments:
        return arguments
    mode = cpu.cudagraph_mode(arguments["cudagraph_runtime_mode"])
    return arguments | {"cudagraph_runtime_mode": mode}


# What a dummy batch that replays a FULL graph must look like. Each function returns what is wrong.


def _planned_for_the_descriptor(batch: IdleBatch, capture: ForwardPass) -> str | None:
    def size(plan: Plan) -> dict[str, Any]:
        """What of a plan depends on the size of the batch."""
        return {
            "kv_cache_group": plan.kv_cache_group,
            "ubatch": plan.ubatch,
            "num_reqs": plan.num_reqs,
            "num_actual_tokens": plan.num_actual_tokens,
            "max_query_len": plan.max_query_len,
            "query_start_loc": plan.query_start_loc,
        }

    planned, captured = ([size(plan) for plan in p.plans] for p in (batch.forward, capture))
    return None if planned == captured else f"planned {planned}, captured {captured}"


def _query_start_loc_ends_at_the_tokens(batch: IdleBatch, capture: ForwardPass) -> str | None:
    num_reqs, num_tokens = _requests(capture), tokens_of(capture)
    for side, starts in (
        ("gpu", batch.forward.query_start_loc),
        ("cpu", batch.forward.query_start_loc_cpu),
    ):
        if starts[0] != 0 or sorted(starts) != starts or set(starts[num_reqs:]) != {num_tokens}:
            return (
                f"{side} {starts[: num_reqs + 2]}... for requests {num_reqs}, tokens {num_tokens}"
            )
    return None


def _seq_lens_of_the_requests(batch: IdleBatch, capture: ForwardPass) -> str | None:
    num_reqs = _requests(capture)
    seq_lens = batch.forward.seq_lens
    # An idle batch has no context: a request is as long as its query, or as the longest.
    starts = capture.query_start_loc[: num_reqs + 1]
    queries = [end - start for start, end in itertools.pairwise(starts)]
    longest = max(plan.max_query_len for plan in capture.plans)
    fit = all(
        query <= length <= longest
        for query, length in zip(queries, seq_lens[:num_reqs], strict=True)
    )
    return None if fit and not any(seq_lens[num_reqs:]) else f"{seq_lens[: num_reqs + 1]}..."


def _no_slot(batch: IdleBatch, capture: ForwardPass) -> str | None:
    written = [
        [slot for slot in slots[: tokens_of(capture)] if slot != -1]
        for slots in batch.forward.slot_mapping
    ]
    return f"slots by KV cache group: {written}" if any(written) else None


def _null_block(batch: IdleBatch, capture: ForwardPass) -> str | None:
    tables = [rows[: _requests(capture)] for rows in batch.forward.block_table]
    tables += [plan.block_table for plan in batch.forward.plans]
    rows = [row for table in tables for row in table if any(row)]
    return f"block-table rows {rows}" if rows else None


def _event_respected(batch: IdleBatch, capture: ForwardPass) -> str | None:
    return unprotected(batch.forward.events)


def _seq_lens_before_model_kwargs(batch: IdleBatch, capture: ForwardPass) -> str | None:
    earlier, model = batch.forward.seq_lens_at_model_kwargs, batch.forward.seq_lens
    if batch.forward.metadata is None:
        return "seq_lens are the last real step's"
    return None if earlier == model else "seq_lens are filled after _init_model_kwargs"


REQUIREMENTS: dict[str, Callable[[IdleBatch, ForwardPass], str | None]] = {
    "metadata is planned for the replayed descriptor": _planned_for_the_descriptor,
    "query_start_loc never decreases and ends at the tokens": _query_start_loc_ends_at_the_tokens,
    "seq_lens cover the descriptor's requests, 0 after": _seq_lens_of_the_requests,
    "every slot of a FULL dummy batch is -1": _no_slot,
    "block-table rows are the null block": _null_block,
    "pinned buffers are written between synchronize and record": _event_respected,
    "collectives are as many as in stock vLLM": lambda batch, _: stock_collectives(batch),
    "the live request is untouched": lambda batch, _: live_request_untouched(batch),
    "seq_lens are filled before _init_model_kwargs": _seq_lens_before_model_kwargs,
}
NESTED_EVENT = "a dummy batch may run inside synchronize_input_prep"


def _requests(capture: ForwardPass) -> int:
    """Requests of the graph, all microbatches together."""
    return sum(plan.num_reqs for plan in capture.plans if plan.kv_cache_group == 0)


def check_requirements(
    batches: list[IdleBatch], nested_event: list[str] | None
) -> list[dict[str, Any]]:
    """Each requirement over all batches that replay a FULL graph: name, ok, detail (what is wrong).

    Raises:
        ValueError: no batch replays one, so there is nothing to check.
    """
    replayed = [(batch, batch.capture) for batch in batches if batch.capture is not None]
    if not replayed:
        raise ValueError("no idle batch replays a FULL graph")
    results = []
    for name, check in REQUIREMENTS.items():
        wrong = [
            f"{batch}: {detail}"
            for batch, capture in replayed
            if (detail := check(batch, capture)) is not None
        ]
        results.append(requirement(name, wrong))
    if nested_event is not None:
        detail = unprotected(nested_event)
        results.append(requirement(NESTED_EVENT, [detail] if detail else []))
    return results


def find_faults(modes: dict[str, ForwardPass], batches: list[IdleBatch]) -> list[str]:
    """The bug, if any pass shows it."""
    passes = {f"_dummy_run(4), {call}": forward for call, forward in modes.items()}
    passes |= {str(batch): batch.forward for batch in batches}
    where = [name for name, p in passes.items() if p.mode == "FULL" and p.metadata is None]
    return [f"{MISSING_METADATA} ({'; '.join(where)})"] if where else []


def _summary(forward: ForwardPass) -> dict[str, Any]:
    return {
        "mode": forward.mode,
        "metadata": forward.metadata,
        "descriptor": forward.descriptor,
    }


def _row(batch: IdleBatch) -> dict[str, Any]:
    forward, capture = batch.forward, batch.capture
    num_reqs = 1 if capture is None else _requests(capture)
    num_tokens = forward.num_input_tokens if capture is None else tokens_of(capture)
    return {
        "scenario": batch.scenario,
        "last_step": batch.last_step,
        "padded_to": batch.padded_to,
        **_summary(forward),
        "query_start_loc": forward.query_start_loc[: num_reqs + 1],
        "query_start_loc_cpu": forward.query_start_loc_cpu[: num_reqs + 1],
        "seq_lens": forward.seq_lens[:num_reqs],
        "seq_lens_at_model_kwargs": forward.seq_lens_at_model_kwargs[:num_reqs],
        "slot_mapping": [slots[:num_tokens] for slots in forward.slot_mapping],
        "block_table": [rows[:num_reqs] for rows in forward.block_table],
        "plans": [dataclasses.asdict(plan) for plan in forward.plans],
        "captured_plans": []
        if capture is None
        else [dataclasses.asdict(plan) for plan in capture.plans],
        "collectives": forward.collectives,
        "events": forward.events,
        "live_blocks_kept": batch.live_blocks_kept,
        "next_step_kept": batch.next_step_kept,
    }


def _table(observations: dict[str, Any], requirements: list[dict[str, Any]]) -> str:
    """One row a dummy batch, then a line a requirement."""
    calls = [[row["call"], row["mode"], _metadata(row)] for row in observations["modes"]]
    batches = []
    for row in observations["idle_batches"]:
        slots = sorted({slot for group in row["slot_mapping"] for slot in group})
        event = "-" if row["mode"] != "FULL" else unprotected(row["events"]) or "respected"
        padded_to = "alone" if row["padded_to"] == 1 else row["padded_to"]
        batches.append(
            [
                f"{row['scenario']}, after a {row['last_step']}",
                *(padded_to, row["mode"], _metadata(row)),
                *(shortened(slots), shortened(row["query_start_loc"]), event),
            ]
        )
    lines = [
        tabulate(calls, headers=["_dummy_run(4)", "mode", "metadata"]),
        "",
        tabulate(
            batches,
            headers=[
                "idle batch",
                "padded to",
                "mode",
                "metadata",
                "distinct slots",
                "query starts",
                "input-preparation event",
            ],
        ),
        "",
    ]
    lines += [f"{'ok ' if found['ok'] else 'NOT'} {found['name']}" for found in requirements]
    return "\n".join(lines)


def _metadata(row: dict[str, Any]) -> str:
    if row["metadata"] is None:
        return "none"
    return ", ".join(sorted({kind for ubatch in row["metadata"] for kind in ubatch.values()}))


if __name__ == "__main__":
    sys.exit(run(__doc__, observe))
