"""Reproduction for the fix ``dispatch-order``: ``python -m vllm_cgfix.verify.dispatch_order``.

A data-parallel rank with nothing to do runs ``_dummy_run(1, uniform_decode=True)`` beside ranks
that work. Where the bug is, it replays a FULL graph without attention metadata, on what the last
real step left in the persistent buffers. This runs the real V1 runner on a CPU, in one process,
with whichever vLLM is importable, and reports what its dummy batches put in front of the model.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tabulate import tabulate

import vllm_cgfix

from . import cpu, print_outcome
from .v1_runner import ForwardPass, LiveRequest, Plan, Probe, as_dict

MISSING_METADATA = "FULL graph replayed without attention metadata"
# The releases that the fix is for.
FIXED_RELEASES = "0.11."
PADDED_TO = (1, 8, 64)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kind of runner, and the idle batches it is observed with."""

    name: str
    mode: str = "FULL_DECODE_ONLY"
    max_num_seqs: int = 64
    uniform_decode_query_len: int = 1
    kv_cache_groups: int = 1
    microbatches: bool = False
    last_steps: tuple[str, ...] = ("decode",)
    padded_to: tuple[int, ...] = PADDED_TO


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


@dataclasses.dataclass
class IdleBatch:
    """One idle batch: where it ran, its forward pass, and the pass that captured its graph.

    ``capture`` is None when no FULL graph was dispatched. ``live_blocks_kept``: the host's block
    tables are as before. ``next_step_kept``: the next real step prepares what it would have
    prepared without the dummy batch. ``stock_collectives``: how often a stock release asks the
    other ranks; a rank that asked more or less often would leave them waiting.
    """

    scenario: str
    last_step: str
    padded_to: int
    forward: ForwardPass
    capture: ForwardPass | None
    live_blocks_kept: bool
    next_step_kept: bool
    stock_collectives: int

    def __str__(self) -> str:
        padding = "alone" if self.padded_to == 1 else f"padded to {self.padded_to}"
        return f"{self.scenario}, after a {self.last_step}, {padding}"


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
    return {
        "vllm": version,
        "observations": observations,
        "requirements": requirements,
        "faults": find_faults(modes, batches),
        "status": {status.fix.id: status.state.value for status in vllm_cgfix.status()},
        "text": _table(observations, requirements),
    }


def observe_modes() -> dict[str, ForwardPass]:
    """``_dummy_run(4)`` for each way to give the mode, with FULL graphs for mixed batches."""
    with _probe(Scenario("modes", mode="FULL")) as probe:
        return {
            call: probe.dummy_run(4, **_with_mode(arguments)) for call, arguments in MODES.items()
        }


def observe_idle_batches(scenario: Scenario) -> list[IdleBatch]:
    """An idle batch after each kind of real step, for each size that another rank may have."""
    with _probe(scenario) as probe:
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
    # Two microbatches need a batch of their own that is large enough to be split.
    num_tokens = padded_to if scenario.microbatches else 1
    with probe.input_preparation_event(), probe.busy_rank(padded_to):
        forward = probe.dummy_run(num_tokens, uniform_decode=True)
    live_blocks_kept = _host_block_tables(probe) == blocks
    next_step_kept = live.decode().inputs() == expected
    live.finish()
    return IdleBatch(
        scenario=scenario.name,
        last_step=last_step,
        padded_to=padded_to,
        forward=forward,
        capture=captures.of(forward),
        live_blocks_kept=live_blocks_kept,
        next_step_kept=next_step_kept,
        stock_collectives=2 if scenario.microbatches and probe.agrees_on_microbatches_first else 1,
    )


def _live_request(probe: Probe, req_id: str, last_step: str) -> LiveRequest:
    request = LiveRequest(probe, req_id)
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


def observe_nested_event() -> list[str] | None:
    """The event's log for a dummy batch inside ``synchronize_input_prep``, as the external
    launcher runs it from 0.11.1 on. None where the runner has no such method (0.10.2)."""
    with _probe(Scenario("nested event")) as probe:
        if not hasattr(probe.runner, "synchronize_input_prep"):
            return None
        with probe.input_preparation_event(), probe.runner.synchronize_input_prep():
            forward = probe.dummy_run(1, uniform_decode=True)
        return forward.events  # with the outer record


class _Captures:
    """The forward pass that captures each graph, recorded before any request is live."""

    def __init__(self, probe: Probe, scenario: Scenario) -> None:
        self._passes: dict[tuple[int, bool], ForwardPass] = {}
        for num_tokens, uniform in _full_graphs(probe):
            with contextlib.ExitStack() as stack:
                if scenario.microbatches:
                    stack.enter_context(probe.busy_rank(num_tokens))
                self._passes[num_tokens, uniform] = probe.dummy_run(
                    num_tokens, **_with_mode(MODES["mode FULL"]), uniform_decode=uniform
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
def _probe(scenario: Scenario) -> Iterator[Probe]:
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


def _with_mode(arguments: dict[str, Any]) -> dict[str, Any]:
    if "cudagraph_runtime_mode" not in arguments:
        return arguments
    mode = cpu.cudagraph_mode(arguments["cudagraph_runtime_mode"])
    return arguments | {"cudagraph_runtime_mode": mode}


# What a dummy batch that replays a FULL graph must look like. Each function returns what is wrong.


def _planned_for_the_descriptor(batch: IdleBatch, capture: ForwardPass) -> str | None:
    def size(plan: Plan) -> dict[str, Any]:
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
    num_reqs, num_tokens = _requests(capture), _tokens(capture)
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
        [slot for slot in slots[: _tokens(capture)] if slot != -1]
        for slots in batch.forward.slot_mapping
    ]
    return f"slots by KV cache group: {written}" if any(written) else None


def _null_block(batch: IdleBatch, capture: ForwardPass) -> str | None:
    tables = [rows[: _requests(capture)] for rows in batch.forward.block_table]
    tables += [plan.block_table for plan in batch.forward.plans]
    rows = [row for table in tables for row in table if any(row)]
    return f"block-table rows {rows}" if rows else None


def _event_respected(batch: IdleBatch, capture: ForwardPass) -> str | None:
    return _unprotected(batch.forward.events)


def _unprotected(events: list[str]) -> str | None:
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


def _stock_collectives(batch: IdleBatch, capture: ForwardPass) -> str | None:
    count = batch.forward.collectives
    return None if count == batch.stock_collectives else f"{count}, not {batch.stock_collectives}"


def _live_request_untouched(batch: IdleBatch, capture: ForwardPass) -> str | None:
    if not batch.live_blocks_kept:
        return "the host's block table has changed"
    return None if batch.next_step_kept else "the next real step prepares other inputs"


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
    "collectives are as many as in stock vLLM": _stock_collectives,
    "the live request is untouched": _live_request_untouched,
    "seq_lens are filled before _init_model_kwargs": _seq_lens_before_model_kwargs,
}
NESTED_EVENT = "a dummy batch may run inside synchronize_input_prep"


def _requests(capture: ForwardPass) -> int:
    """Requests of the graph, all microbatches together."""
    return sum(plan.num_reqs for plan in capture.plans if plan.kv_cache_group == 0)


def _tokens(capture: ForwardPass) -> int:
    assert capture.descriptor is not None
    return int(capture.descriptor["num_tokens"])


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
        results.append({"name": name, "ok": not wrong, "detail": "; ".join(wrong)})
    if nested_event is not None:
        detail = _unprotected(nested_event)
        results.append({"name": NESTED_EVENT, "ok": detail is None, "detail": detail or ""})
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
    num_tokens = forward.num_input_tokens if capture is None else _tokens(capture)
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
        event = "-" if row["mode"] != "FULL" else _unprotected(row["events"]) or "respected"
        padded_to = "alone" if row["padded_to"] == 1 else row["padded_to"]
        batches.append(
            [
                f"{row['scenario']}, after a {row['last_step']}",
                *(padded_to, row["mode"], _metadata(row)),
                *(_shortened(slots), _shortened(row["query_start_loc"]), event),
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


def _shortened(numbers: list[int], length: int = 6) -> str:
    more = ", ..." if len(numbers) > length else ""
    return f"[{', '.join(map(str, numbers[:length]))}{more}]"


def main(arguments: list[str] | None = None) -> int:
    """Observe, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    options = parser.parse_args(arguments)
    # vLLM logs to stdout, which is for the result alone.
    with contextlib.redirect_stdout(sys.stderr):
        outcome = observe()
    return print_outcome(outcome, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
