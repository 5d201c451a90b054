"""The reproduction of ``skip-attention``: attention runs while PIECEWISE graphs are captured.

The V2 runner captures each batch descriptor in two forward passes, a warm-up and the capture. In
those of a PIECEWISE descriptor generic attention is part of no graph. Where the forward context
gives it metadata it runs all the same, eagerly, on dummy inputs: that is time spent for nothing,
and the dummy inputs can be longer than the block table that they index.

Real are the configuration, the capture with every forward context that it makes, the attention
layers and their operators; from 0.23.0 on also the runner, its model state, block tables and KV
cache. Imitated are the platform, CUDA graphs and streams, the attention kernels, the rest of the
model, and the draft models of speculators; before 0.23.0, where the V2 runner does not start on a
CPU, also what a runner hands to the capture.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from . import cpu
from .importers import has_module
from .report import columns, outcome, requirement, run
from .v2_capture import (
    COMPLETE,
    MAX_NUM_SEQS,
    METADATA,
    NONE,
    SIZES,
    Capture,
    Failure,
    Pass,
    joined,
    prepare,
)


def reproduce(*, breakable: bool = False) -> dict[str, Any]:
    """Capture with the importable vLLM; this process must not have imported it.

    Args:
        breakable: capture breakable graphs.

    Returns:
        The keys of :class:`vllm_cgfix.verify.Outcome`. ``observations`` has ``passes`` (as in
        :class:`~vllm_cgfix.verify.v2_capture.Pass`), ``capture`` ("runner", "manager" or "none"),
        ``explanation`` (why there can be no fault here, or ""), ``importers`` and
        ``not_importable``.

    Raises:
        ValueError: ``breakable``, and this release has no breakable graphs.
    """
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = str(int(breakable))
    cpu.use_cpu_platform()
    if breakable and not has_module("vllm.compilation.breakable_cudagraph"):
        raise ValueError(f"vLLM {cpu.vllm_version()} has no breakable CUDA graphs")
    config = cpu.make_config(max_num_seqs=MAX_NUM_SEQS)
    if not has_module("vllm.v1.worker.gpu"):
        return _outcome(explanation="this release has no V2 model runner")
    with cpu.single_process_group(config):
        # A process that captures has imported its worker.
        importlib.import_module("vllm.v1.worker.gpu_worker")
        capture = prepare(config)
        capture.run()
        piecewise = any(p.mode == "PIECEWISE" for p in capture.recorder.passes)
        if piecewise:
            capture.run_speculators()
        requirements = _requirements(capture)
        return _outcome(
            capture,
            requirements,
            explanation="" if piecewise else "this release's V2 runner captures FULL graphs only",
        )


def _outcome(
    capture: Capture | None = None,
    requirements: Sequence[dict[str, Any]] = (),
    *,
    explanation: str,
) -> dict[str, Any]:
    passes = capture.recorder.passes if capture else []
    observations = {
        "capture": capture.kind if capture else "none",
        "explanation": explanation,
        "importers": capture.importers if capture else [],
        "not_importable": capture.not_importable if capture else {},
        "passes": [dataclasses.asdict(found) for found in passes],
    }
    text = columns(_rows(passes), requirements, explanation)
    return outcome(_faults(passes), requirements, observations, text)


def _faults(passes: Sequence[Pass]) -> list[str]:
    """One sentence for each manager and kind of pass that runs attention for nothing."""
    ran: dict[tuple[str, str], list[int]] = {}
    for found in passes:
        if found.skippable and set(found.operators.values()) != {NONE}:
            ran.setdefault((found.manager, found.step), []).append(found.num_tokens)
    return [
        f"{manager}: attention ran with metadata in the {step} pass of the PIECEWISE descriptors"
        f" of {', '.join(map(str, sizes))} tokens"
        for (manager, step), sizes in ran.items()
    ]


def _requirements(capture: Capture) -> list[dict[str, Any]]:
    """What has to hold of a capture, whether attention is skipped in it or not."""
    passes = list(capture.recorder.passes)
    return [
        _every_descriptor(passes, capture),
        _raw_metadata(passes),
        _metadata_where_needed(passes),
        _nothing_else_changed(passes),
        _one_answer(passes),
        _served_afterwards(capture, "a capture"),
        _nested_capture(capture),
        _served_after_failure(capture),
        _parameter(capture),
    ]


def _every_descriptor(passes: list[Pass], capture: Capture) -> dict[str, Any]:
    """Without this a capture that does nothing would look faultless."""
    layers = set(capture.attention.layers)
    count = Counter((p.manager, p.mode, p.num_tokens) for p in passes)
    model = type(capture.manager).__name__
    captured = {size for manager, _, size in count if manager == model}
    wrong = [] if layers else ["no attention layer"]
    wrong += [f"size {size} is not captured" for size in SIZES if size not in captured]
    wrong += [f"{key} has {n} passes" for key, n in count.items() if n != 2]
    wrong += [f"layers missing in {p}" for p in passes if set(p.operators) != layers]
    managers = sorted({p.manager for p in passes})
    return requirement(
        "every descriptor is captured in two passes that run every attention layer",
        wrong,
        f"{len(count)} descriptors of {', '.join(managers)}, {len(layers)} layers",
    )


def _raw_metadata(passes: list[Pass]) -> dict[str, Any]:
    """Operators of other kinds (mamba, sparse indexers) read it themselves."""
    complete = sum(p.raw == COMPLETE for p in passes)
    return requirement(
        "where the forward context has metadata, it has it for every layer",
        [f"{p.raw} in {p}" for p in passes if p.raw not in (NONE, COMPLETE)],
        f"{complete} of {len(passes)} passes have it",
    )


def _metadata_where_needed(passes: list[Pass]) -> dict[str, Any]:
    full = [p for p in passes if p.mode == "FULL"]
    needed = [p for p in passes if not p.skippable and (p.raw != NONE or p.mode == "FULL")]
    wrong = [f"{p}" for p in needed if set(p.operators.values()) != {METADATA}]
    return requirement(
        "attention has its metadata in FULL descriptors and in breakable graphs",
        wrong if full else ["no FULL descriptor"],
        f"{len(needed)} passes",
    )


def _nothing_else_changed(passes: list[Pass]) -> dict[str, Any]:
    return requirement(
        "get_attention_context returns each layer's own layer, KV cache and slot mapping",
        [f"{', '.join(p.differences)} in {p}" for p in passes if p.differences],
        f"{len(passes)} passes",
    )


def _one_answer(passes: list[Pass]) -> dict[str, Any]:
    wrong = []
    for found in passes:
        answers = {*found.operators.values(), *found.seen.values()}
        if found.microbatch:
            answers.add(found.microbatch)
        if len(answers) != 1:
            wrong.append(f"{joined(answers)} in {found}")
    bindings = {name for p in passes for name in p.seen}
    return requirement(
        "operators, microbatches and importers of get_attention_context see the same",
        wrong,
        f"{len(bindings)} bindings of the function",
    )


def _served_afterwards(capture: Capture, after: str) -> dict[str, Any]:
    given = capture.attention.serve()
    wrong = [] if given == {METADATA} else [f"attention is given {joined(given)}"]
    return requirement(f"after {after} a batch has its metadata", wrong, METADATA)


def _parameter(capture: Capture) -> dict[str, Any]:
    """``set_forward_context(skip_attention=True)`` holds for the contexts made inside as well."""
    attention = capture.attention
    name = "set_forward_context(skip_attention=True) skips, and only while it is active"
    parameters = inspect.signature(attention.context.set_forward_context).parameters
    if "skip_attention" not in parameters:
        return requirement(name, [], "there is no such parameter")
    inside = attention.serve(skip_attention=True)
    after = attention.serve()
    wrong = [] if inside == {NONE} else [f"attention is given {joined(inside)} in it"]
    wrong += [] if after == {METADATA} else [f"attention is given {joined(after)} after it"]
    return requirement(name, wrong, "in operators and microbatches")


def _served_after_failure(capture: Capture) -> dict[str, Any]:
    recorder = capture.recorder
    recorder.fail_in = 0
    try:
        with recorder.forgetting():
            capture.run()
    except Failure as failure:
        return _served_afterwards(capture, f"a failure in {failure}")
    finally:
        recorder.fail_in = None
    return requirement("a capture can fail", ["it did not reach its first pass"], "")


def _nested_capture(capture: Capture) -> dict[str, Any]:
    """A pass of a PIECEWISE descriptor makes two contexts, as a speculator does for its steps, and
    between them the model is captured."""
    attention = capture.attention
    given: list[str] = []

    def forward(cg_mode: Any) -> None:
        metadata = {name: SimpleNamespace() for name in attention.layers}
        for step in range(2):
            with attention.context.set_forward_context(
                metadata, attention.config, num_tokens=1, cudagraph_runtime_mode=cg_mode
            ):
                given.append(joined(set(attention.run(1).values())))
            if step == 0:
                capture.forget_graphs()
                capture.run()

    with capture.recorder.forgetting():
        possible = capture.run_passes(forward)
    wrong = [] if len(set(given)) <= 1 else [", ".join(given)]
    return requirement(
        "a capture inside a pass leaves the rest of the pass as it was",
        wrong,
        f"{len(given)} contexts" if possible else "no PIECEWISE descriptors here",
    )


def _rows(passes: Sequence[Pass]) -> list[list[str]]:
    """What the passes saw, those that saw the same in one row."""
    sizes: dict[tuple[str, ...], list[str]] = {}
    for found in passes:
        key = (
            found.manager,
            found.mode + " breakable" * found.breakable,
            found.step,
            found.runtime_mode,
            found.raw,
            joined(set(found.operators.values())),
        )
        sizes.setdefault(key, []).append(str(found.num_tokens))
    rows = [["captured by", "descriptors", "pass", "runtime mode", "context has", "attention has"]]
    for (manager, mode, *rest), tokens in sizes.items():
        rows.append([manager, f"{mode} {', '.join(tokens)}", *rest])
    return rows


if __name__ == "__main__":
    sys.exit(
        run(
            __doc__,
            reproduce,
            flags={
                "breakable": (
                    "capture breakable graphs (from 0.23.0), which need generic attention"
                )
            },
        )
    )
