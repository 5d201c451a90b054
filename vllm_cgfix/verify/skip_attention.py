"""Which passes of a CUDA graph capture run generic attention with metadata (fix ``skip-attention``).

The V2 model runner captures each batch descriptor in two forward passes, a warm-up and the capture.
In a PIECEWISE descriptor generic attention is not part of any graph: with attention metadata in the
forward context it runs eagerly, on dummy inputs. That costs capture time, and the dummy inputs can
be longer than the block table that they index.

This reproduction runs the importable vLLM's own capture over a small Llama and reports, pass by
pass, what its attention layers were given::

    python -m vllm_cgfix.verify.skip_attention [--json] [--breakable]

Real are the configuration, the capture and every context that it makes, the attention layers and
their operators; from 0.23.0 on also the runner with its model state, block tables and KV cache.
Imitated are the edges: the platform, CUDA graphs and streams, the attention kernels and the rest of
the model; before 0.23.0, where the V2 runner does not start on a CPU, also model state and block
tables.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_cgfix.verify import cpu

MODE = "FULL_AND_PIECEWISE"
SIZES = (1, 2, 4, 16)
MAX_NUM_SEQS = 8
DEVICE = torch.device("cpu")

GIVEN = "metadata"
NONE = "none"
OTHER = "other metadata"


@dataclass
class Pass:
    """One forward pass of a capture, as an attention layer in it sees the world.

    :ivar mode: the descriptor's mode, "PIECEWISE" or "FULL".
    :ivar num_tokens: the descriptor's size.
    :ivar step: "warm-up" for the descriptor's first pass, "capture" for the one after it.
    :ivar breakable: the descriptor is captured as a breakable graph.
    :ivar runtime_mode: the forward context's ``cudagraph_runtime_mode``.
    :ivar in_graph: the pass runs inside ``torch.cuda.graph``.
    :ivar raw: the context's ``attn_metadata``: "none", "complete", or which layers it lacks.
    :ivar operators: what the generic attention operator of each layer handed to its kernel.
    :ivar seen: metadata that ``get_attention_context`` returned, by the module that called it.
    :ivar microbatch: the same, in a context made inside this one and read by another thread.
    :ivar differences: what else ``get_attention_context`` returned that is not the layer's own.
    """

    mode: str
    num_tokens: int
    step: str
    breakable: bool
    runtime_mode: str
    in_graph: bool
    raw: str
    operators: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    microbatch: str = ""
    differences: list[str] = field(default_factory=list)

    @property
    def skippable(self) -> bool:
        """Nothing that this pass leaves behind depends on generic attention."""
        return self.mode == "PIECEWISE" and not self.breakable

    def __str__(self) -> str:
        return f"the {self.step} pass of the {self.mode} descriptor of {self.num_tokens} tokens"


@dataclass
class Requirement:
    """Something that has to hold with the fix and without it."""

    name: str
    ok: bool
    detail: str


@dataclass
class Result:
    """What one process found out about the importable vLLM.

    :ivar vllm: its version.
    :ivar capture: what was run: "runner", "manager", or "none" with the reason in ``explanation``.
    :ivar observations: every pass, in order.
    :ivar faults: one sentence for each pass that ran generic attention without need.
    """

    vllm: str
    capture: str = "none"
    explanation: str = ""
    breakable: bool = False
    importers: list[str] = field(default_factory=list)
    not_importable: dict[str, str] = field(default_factory=dict)
    observations: list[Pass] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults and all(requirement.ok for requirement in self.requirements)


class Failure(Exception):
    """Raised by the model in the middle of a captured pass, to see what is left behind."""


class Attention:
    """The attention layers of a loaded model, with recorders in place of their kernels."""

    def __init__(self, config: Any, importers: dict[str, Callable[[str], Any]]) -> None:
        base = _import_first(
            "vllm.model_executor.layers.attention.attention", "vllm.attention.layer"
        ).Attention
        registered = config.compilation_config.static_forward_context
        self.config = config
        self.layers = {name: x for name, x in registered.items() if isinstance(x, base)}
        self.importers = importers
        self.context = importlib.import_module("vllm.forward_context")
        self._given: dict[str, Any] = {}
        for name, layer in self.layers.items():
            layer.impl.forward = self._recorder(name, layer.impl.forward)
            layer.impl.do_kv_cache_update = lambda *args, **kwargs: None

    def _recorder(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(kernel)

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            self._given[name] = arguments["attn_metadata"]
            return arguments.get("output")

        return forward

    def run(self, num_tokens: int) -> dict[str, str]:
        """Run each layer on zeros, and say with which metadata its operator called the kernel."""
        self._given.clear()
        for layer in self.layers.values():
            heads = torch.zeros(num_tokens, layer.num_heads * layer.head_size)
            kv_heads = torch.zeros(num_tokens, layer.num_kv_heads * layer.head_size)
            layer(heads, kv_heads, kv_heads)
        return {name: self._describe(name, given) for name, given in self._given.items()}

    def _describe(self, name: str, metadata: Any) -> str:
        raw = self.context.get_forward_context().attn_metadata
        if metadata is None:
            return NONE
        return GIVEN if raw is not None and metadata is raw[name] else OTHER

    def raw(self) -> str:
        """Whether the context's own dictionary names every layer."""
        metadata = self.context.get_forward_context().attn_metadata
        if metadata is None:
            return NONE
        missing = [name for name in self.layers if metadata.get(name) is None]
        return "without " + ", ".join(missing) if missing else "complete"

    def look(self, found: Pass) -> None:
        """Ask ``get_attention_context`` about every layer, from each module that imported it."""
        for importer, get_attention_context in self.importers.items():
            answers = set()
            for name, layer in self.layers.items():
                metadata, *rest = get_attention_context(name)
                answers.add(self._describe(name, metadata))
                found.differences += [
                    f"{importer}: {what} of {name}"
                    for what, same in self._compare(name, layer, rest).items()
                    if not same
                ]
            found.seen[importer] = " and ".join(sorted(answers))

    def _compare(self, name: str, layer: Any, rest: list[Any]) -> dict[str, bool]:
        context = self.context.get_forward_context()
        kv_cache = layer.kv_cache
        if hasattr(context, "virtual_engine"):
            kv_cache = kv_cache[context.virtual_engine]
        same = {"layer": rest[0] is layer, "kv_cache": rest[1] is kv_cache}
        if len(rest) > 2:
            same["slot_mapping"] = rest[2] is context.slot_mapping.get(name)
        return same

    def in_microbatch(self) -> str:
        """What a microbatch sees: its context is made here, as UBatchWrapper makes it, and read by
        a thread of its own."""
        active = self.context.get_forward_context()
        slots = {"slot_mapping": active.slot_mapping} if hasattr(active, "slot_mapping") else {}
        inner = self.context.create_forward_context(active.attn_metadata, self.config, **slots)
        answers: set[str] = set()

        def read() -> None:
            get_attention_context = next(iter(self.importers.values()))
            for name in self.layers:
                answers.add(self._describe(name, get_attention_context(name)[0]))

        with self.context.override_forward_context(inner):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        return " and ".join(sorted(answers))


class Recorder:
    """Follows a capture: which descriptor it is at, and what each of its passes sees."""

    def __init__(self, attention: Attention, graphs: cpu.CudaGraphs, passes: list[Pass]) -> None:
        self.attention = attention
        self.passes = passes
        self.fail_at: int | None = None
        self._graphs = graphs
        self._descriptor = ("", 0)
        self._step = 0
        self._breakable = False

    def begin(self, mode: str, num_tokens: int, *, breakable: bool) -> None:
        """The capture has come to its next descriptor."""
        self._descriptor = (mode, num_tokens)
        self._step = 0
        self._breakable = breakable and mode == "PIECEWISE"

    def follow(self, manager: Any) -> None:
        """Have ``manager``, of whatever release, tell :meth:`begin` what it captures.

        From 0.18.0 it loops over lists of descriptors, which report as they are iterated; before,
        it captures through its method ``capture_graph``.
        """
        if hasattr(manager, "_capture_descs"):
            breakable = getattr(manager, "use_breakable_cg", False)

            class Watched(list[Any]):
                def __iter__(descriptors) -> Iterator[Any]:  # noqa: N805 (self is the recorder)
                    for descriptor in super().__iter__():
                        mode = descriptor.cg_mode.name
                        self.begin(mode, descriptor.num_tokens, breakable=breakable)
                        yield descriptor

            for mode, descriptors in manager._capture_descs.items():
                manager._capture_descs[mode] = Watched(descriptors)
        else:
            capture_graph = manager.capture_graph
            signature = inspect.signature(capture_graph)

            def watched(*args: Any, **kwargs: Any) -> Any:
                arguments = signature.bind(*args, **kwargs).arguments
                # Before 0.17.0 there is no mode to choose: every graph is FULL.
                mode = arguments.get("capture_cg_mode", cpu.cudagraph_mode("FULL"))
                self.begin(mode.name, arguments["num_tokens"], breakable=False)
                return capture_graph(*args, **kwargs)

            manager.capture_graph = watched

    def record(self, num_tokens: int) -> None:
        """Called by the model in each forward pass.

        :raises Failure: this is the pass that was to fail.
        """
        context = self.attention.context.get_forward_context()
        mode, size = self._descriptor
        found = Pass(
            mode=mode,
            num_tokens=size,
            step="capture" if self._step else "warm-up",
            breakable=self._breakable,
            runtime_mode=context.cudagraph_runtime_mode.name,
            in_graph=self._graphs.capturing,
            raw=self.attention.raw(),
            operators=self.attention.run(num_tokens),
        )
        self.attention.look(found)
        if self.attention.importers:
            found.microbatch = self.attention.in_microbatch()
        self._step += 1
        self.passes.append(found)
        if self.fail_at == len(self.passes):
            raise Failure(str(found))


def make_model(recorder: Recorder, runner_model: Any = None) -> torch.nn.Module:
    """The model to capture: it runs the attention layers and nothing else.

    :param runner_model: the runner's own model, for whatever else the runner asks of it.
    """
    bases: tuple[type, ...] = (torch.nn.Module,)
    with contextlib.suppress(ImportError):
        wrapper = importlib.import_module("vllm.compilation.wrapper")
        # From 0.30.0 a PIECEWISE capture insists on a model with a compiled part.
        bases += (wrapper.TorchCompileWithNoGuardsWrapper,)

    class Model(*bases):  # type: ignore[misc]
        do_not_compile = False
        __call__ = torch.nn.Module.__call__

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, *, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
            recorder.record(len(positions))
            return torch.zeros(len(positions), cpu.LLAMA["hidden_size"])

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(runner_model, name)

    model: torch.nn.Module = Model()
    return model


def capture_with_runner(config: Any, passes: list[Pass], result: Result) -> Capture:
    """The V2 runner's ``capture_model()``, on everything that the runner made itself."""
    runner = cpu.make_v2_runner(config)
    graphs = cpu.imitate_cuda_graphs()
    cpu.capture_as_on_gpu(runner, MODE, SIZES)
    attention = Attention(config, import_all(result))
    recorder = Recorder(attention, graphs, passes)
    runner.model = make_model(recorder, runner.model)
    recorder.follow(runner.cudagraph_manager)
    return Capture(recorder, runner.cudagraph_manager, runner.capture_model)


def capture_with_manager(config: Any, passes: list[Pass], result: Result) -> Capture:
    """The graph manager's ``capture()``, with imitations of what its runner would hand to it."""
    importlib.import_module("vllm.model_executor.model_loader").get_model(vllm_config=config)
    graphs = cpu.imitate_cuda_graphs()
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    attention = Attention(config, import_all(result))
    recorder = Recorder(attention, graphs, passes)
    cpu.set_cudagraph_mode(config, MODE, SIZES)

    manager_type = getattr(utils, "ModelCudaGraphManager", None) or utils.CudaGraphManager
    manager = cpu.call(
        manager_type,
        vllm_config=config,
        device=DEVICE,
        cudagraph_mode=cpu.cudagraph_mode(MODE),
        decode_query_len=1,
        uses_mrope=False,
        use_aux_hidden_state_outputs=False,
    )
    recorder.follow(manager)
    buffers = importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBuffers
    max_num_tokens = config.scheduler_config.max_num_batched_tokens
    names = list(attention.layers)
    arguments = {
        "model": make_model(recorder),
        "model_state": ModelState(names),
        "input_buffers": cpu.call(
            buffers,
            max_num_reqs=MAX_NUM_SEQS,
            max_num_tokens=max_num_tokens,
            inputs_embeds_size=cpu.LLAMA["hidden_size"],
            vocab_size=cpu.LLAMA["vocab_size"],
            dtype=torch.float32,
            device=DEVICE,
            pin_memory=False,
        ),
        "intermediate_tensors": None,
        "mrope_positions": None,
        "inputs_embeds": None,
        "block_tables": BlockTables(max_num_tokens),
        "attn_groups": [],
        "attn_metadata_builders": [MetadataBuilder()],
        "kv_cache_config": SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=names)], num_blocks=8
        ),
    }
    return Capture(recorder, manager, lambda: cpu.call(manager.capture, **arguments))


class ModelState:
    """Metadata for every layer, as a runner's model state makes it (from 0.17.0)."""

    max_model_len = 128
    supports_mm_inputs = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict.fromkeys(self.names, SimpleNamespace())


class MetadataBuilder:
    """Metadata for one group of layers, as a backend makes it (before 0.17.0)."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace()


class BlockTables:
    """A runner's block tables, all at the null block."""

    cp_size = 1
    cp_rank = 0
    cp_interleave = 1

    def __init__(self, max_num_tokens: int) -> None:
        self.input_block_tables = [torch.zeros(MAX_NUM_SEQS, 4, dtype=torch.int32)]
        self.slot_mappings = torch.full((1, max_num_tokens), -1, dtype=torch.int64)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return tuple(table[:num_reqs] for table in self.input_block_tables)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        return self.slot_mappings[:, :num_tokens]


@dataclass
class Capture:
    """A capture that is ready to run, any number of times."""

    recorder: Recorder
    manager: Any
    run: Callable[[], Any]

    @property
    def attention(self) -> Attention:
        return self.recorder.attention


def import_all(result: Result) -> dict[str, Callable[[str], Any]]:
    """Every module of the importable vLLM that has ``get_attention_context`` under that name.

    Those that do not import here (another platform's models) are named in ``result``.
    """
    found: dict[str, Callable[[str], Any]] = {}
    for name in modules_with("get_attention_context"):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a model may fail in any way on a platform that is not its own
            result.not_importable[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found[name] = module.get_attention_context
    result.importers = list(found)
    return found


def modules_with(function: str) -> list[str]:
    """Modules that define or import ``function`` at their top level, the defining one first."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    defining, importing = [], []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if function not in text:
            continue
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                defining.append(module)
            elif isinstance(node, ast.ImportFrom) and function in {a.name for a in node.names}:
                importing.append(module)
    return defining + importing


def _import_first(*names: str) -> Any:
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(" and ".join(names))


@contextlib.contextmanager
def serving(capture: Capture) -> Iterator[None]:
    """The context of a batch outside any capture."""
    attention = capture.attention
    metadata = dict.fromkeys(attention.layers, SimpleNamespace())
    with attention.context.set_forward_context(metadata, attention.config, num_tokens=1):
        yield


def seen_when_serving(capture: Capture) -> set[str]:
    with serving(capture):
        return set(capture.attention.run(1).values())


def check(capture: Capture, result: Result) -> None:
    """Capture, and judge what the passes saw and what the capture left behind."""
    capture.run()
    passes = result.observations
    result.faults = [
        f"Generic attention of {len(given)} layers ran with metadata in {found}."
        for found in passes
        if found.skippable
        and (given := [name for name, what in found.operators.items() if what != NONE])
    ]
    result.requirements += [
        require_passes(passes, capture.attention),
        require_raw(passes),
        require_metadata(passes),
        require_same_rest(passes),
        require_one_answer(passes),
        require_clean(capture, "after a capture"),
        require_restored(capture, passes),
        require_clean_after_failure(capture, passes),
    ]


def require_passes(passes: list[Pass], attention: Attention) -> Requirement:
    """Without this a capture that does nothing would look faultless."""
    steps = collections.Counter((p.mode, p.num_tokens) for p in passes)
    missing = [size for size in SIZES if not any(size == tokens for _, tokens in steps)]
    once = [key for key, count in steps.items() if count != 2]
    silent = [str(p) for p in passes if set(p.operators) != set(attention.layers)]
    return Requirement(
        "every size is captured in two passes that run every attention layer",
        bool(attention.layers) and not (missing or once or silent),
        f"{len(passes)} passes of {len(steps)} descriptors, {len(attention.layers)} layers"
        + (f"; sizes not captured: {missing}" if missing else "")
        + (f"; not two passes: {once}" if once else "")
        + (f"; layers missing in: {silent}" if silent else ""),
    )


def require_raw(passes: list[Pass]) -> Requirement:
    partial = [f"{p}: {p.raw}" for p in passes if p.raw not in (NONE, "complete")]
    count = sum(p.raw == "complete" for p in passes)
    return Requirement(
        "the metadata in the forward context, where there is any, is complete",
        not partial,
        "; ".join(partial) or f"complete in {count} of {len(passes)} passes",
    )


def require_metadata(passes: list[Pass]) -> Requirement:
    """What the fix must not touch: it is asked about the stock code as well."""
    kept = [p for p in passes if not p.skippable and p.raw != NONE]
    full = [p for p in passes if p.mode == "FULL"]
    wrong = [str(p) for p in kept if set(p.operators.values()) != {GIVEN}]
    wrong += [f"{p}: no metadata" for p in full if p.raw == NONE]
    return Requirement(
        "passes of FULL descriptors and of breakable graphs run attention with metadata",
        bool(full) and not wrong,
        "; ".join(wrong) or f"{len(kept)} passes",
    )


def require_same_rest(passes: list[Pass]) -> Requirement:
    different = [f"{p}: {', '.join(p.differences)}" for p in passes if p.differences]
    return Requirement(
        "get_attention_context returns each layer's own layer, KV cache and slot mapping",
        not different,
        "; ".join(different) or f"{len(passes)} passes",
    )


def require_one_answer(passes: list[Pass]) -> Requirement:
    """A skipped pass skips everywhere: in each module's import, each operator, each microbatch."""
    split = []
    for found in passes:
        answers = {*found.operators.values(), *found.seen.values()}
        if found.microbatch:
            answers.add(found.microbatch)
        if len(answers) != 1:
            split.append(f"{found}: {' / '.join(sorted(answers))}")
    importers = sorted({name for p in passes for name in p.seen})
    return Requirement(
        "importers of get_attention_context, operators and microbatches agree in each pass",
        not split,
        "; ".join(split) or f"{len(importers)} modules with the name",
    )


def require_clean(capture: Capture, when: str) -> Requirement:
    answers = seen_when_serving(capture)
    return Requirement(
        f"{when} a batch is served with its metadata",
        answers == {GIVEN},
        " and ".join(sorted(answers)),
    )


def require_clean_after_failure(capture: Capture, passes: list[Pass]) -> Requirement:
    """A pass fails in the middle of the capture of its first descriptor."""
    before = len(passes)
    capture.recorder.fail_at = before + 1
    try:
        capture.run()
    except Failure as failure:
        found = require_clean(capture, "after a capture that failed")
        found.detail = f"{found.detail}, after failing in {failure}"
        return found
    finally:
        capture.recorder.fail_at = None
        del passes[before:]
    return Requirement("a pass fails", False, "the failing pass was not reached")


def require_restored(capture: Capture, passes: list[Pass]) -> Requirement:
    """A capture runs inside a PIECEWISE pass; afterwards the pass makes another context, as the
    draft steps of a speculator do."""
    name = "a capture inside a pass leaves the rest of that pass as it was"
    attention = capture.attention
    answers: list[set[str]] = []

    def forward(cg_mode: Any) -> None:
        metadata = dict.fromkeys(attention.layers, SimpleNamespace())
        for _ in range(2):
            with attention.context.set_forward_context(
                metadata, attention.config, num_tokens=1, cudagraph_runtime_mode=cg_mode
            ):
                answers.append(set(attention.run(1).values()))
            if len(answers) == 1:
                _forget_graphs(capture.manager)
                capture.run()

    before = len(passes)
    try:
        if not _capture_forward(capture.manager, forward):
            return Requirement(name, True, "no PIECEWISE descriptor to capture in this release")
    finally:
        del passes[before:]
    first = answers[0]
    return Requirement(
        name,
        all(answer == first for answer in answers),
        f"{len(answers)} contexts, " + ", ".join(" and ".join(sorted(a)) for a in answers),
    )


def _forget_graphs(manager: Any) -> None:
    manager.graphs.clear()


def _capture_forward(manager: Any, forward: Callable[[Any], None]) -> bool:
    """Capture one PIECEWISE descriptor of a pass of ours, with the manager's own loop."""
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    piecewise = cpu.cudagraph_mode("PIECEWISE")
    if not hasattr(manager, "_capture_descs"):
        if "capture_cudagraph_mode" not in inspect.signature(utils.capture_graphs).parameters:
            return False

        def capture_fn(size: int, mode: Any) -> None:
            forward(cpu.cudagraph_mode("NONE"))
            forward(mode)

        utils.capture_graphs({1: 1}, DEVICE, capture_fn, piecewise)
        return True

    outer = cpu.call(
        utils.CudaGraphManager,
        vllm_config=manager.vllm_config,
        device=DEVICE,
        cudagraph_mode=cpu.cudagraph_mode(MODE),
        decode_query_len=1,
    )
    outer._capture_descs = {piecewise: list(outer._capture_descs[piecewise])[-1:]}
    # From 0.21.0 to 0.25.1 the factory also returns the attention state.
    pair = any(hasattr(utils, name) for name in ("CapturedAttentionState", "AttentionStatePair"))
    outer.capture(lambda *args, **kwargs: (forward, None) if pair else forward)
    return True


def reproduce(*, breakable: bool = False) -> Result:
    """Run the capture of the importable vLLM in this process, which must not have imported vLLM.

    :param breakable: capture breakable graphs (from 0.23.0), which are no fault.
    :raises RuntimeError: ``breakable`` where the release has no breakable graphs.
    """
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = str(int(breakable))
    result = Result(cpu.vllm_version(), breakable=breakable)
    cpu.use_cpu_platform()
    if not _has("vllm.v1.worker.gpu"):
        result.explanation = (
            "This release has no V2 model runner, so there is no capture that passes attention"
            " metadata to PIECEWISE descriptors."
        )
        return result
    if breakable and not _has("vllm.compilation.breakable_cudagraph"):
        raise RuntimeError(f"vLLM {result.vllm} has no breakable CUDA graphs")

    config = cpu.make_config(max_num_seqs=MAX_NUM_SEQS)
    with cpu.single_process_group(config):
        if _has("vllm.v1.worker.cpu.model_runner"):
            result.capture = "runner"
            capture = capture_with_runner(config, result.observations, result)
        else:
            result.capture = "manager"
            capture = capture_with_manager(config, result.observations, result)
        check(capture, result)
    if not any(found.mode == "PIECEWISE" for found in result.observations):
        result.explanation = "This release's V2 model runner captures FULL graphs only."
    return result


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def report(result: Result) -> str:
    """The result for people."""
    lines = [f"vLLM {result.vllm}, capture by the V2 {result.capture}"]
    if result.capture == "none":
        lines = [f"vLLM {result.vllm}"]
    if result.explanation:
        lines.append(result.explanation)
    if result.observations:
        lines.append(f"{'descriptor':<16}{'pass':<10}{'runtime mode':<14}{'context':<11}attention")
    for found in result.observations:
        descriptor = f"{found.mode} {found.num_tokens}"
        attention = " and ".join(sorted(set(found.operators.values())))
        lines.append(
            f"{descriptor:<16}{found.step:<10}{found.runtime_mode:<14}{found.raw:<11}{attention}"
            + (" (breakable)" if found.breakable else "")
        )
    for requirement in result.requirements:
        lines.append(
            f"{'ok  ' if requirement.ok else 'FAIL'} {requirement.name}: {requirement.detail}"
        )
    lines += [f"FAULT {fault}" for fault in result.faults]
    if result.ok:
        lines.append("No generic attention in PIECEWISE passes.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 0 without a fault, 1 with one (or with a requirement that does not hold)."""
    parser = argparse.ArgumentParser(prog="skip-attention", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the whole result, for programs")
    parser.add_argument("--breakable", action="store_true", help="capture breakable graphs")
    options = parser.parse_args(argv)
    # vLLM's progress bars and warnings must not end up in the middle of the result.
    with contextlib.redirect_stdout(sys.stderr):
        result = reproduce(breakable=options.breakable)
    print(json.dumps(asdict(result), indent=2) if options.json else report(result))
    return int(not result.ok)


if __name__ == "__main__":
    sys.exit(main())
