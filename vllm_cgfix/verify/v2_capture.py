"""Drive the V2 runner's CUDA graph capture on a CPU and record what each of its passes sees.

:func:`prepare` sets up a capture of the importable vLLM. In each of its forward passes a
:class:`Recorder` stands where the model is: it runs the real attention layers, up to where their
kernels are called, and notes what the forward context and ``get_attention_context`` have for them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from . import cpu
from .importers import has_module, import_all, module_name, package_folder

MODE = "FULL_AND_PIECEWISE"
SIZES = (1, 2, 4, 16)
MAX_NUM_SEQS = 8
DEVICE = torch.device("cpu")

# What a layer was given.
METADATA = "metadata"
NONE = "none"
COMPLETE = "complete"
OTHER = "other metadata"


@dataclass
class Pass:
    """One forward pass of a capture, as the attention layers in it see the world.

    Attributes:
        manager: the class of the graph manager that captures.
        mode: the descriptor's mode, "PIECEWISE" or "FULL".
        num_tokens: the descriptor's size.
        step: "warm-up" for the descriptor's first pass, "capture" for the one after it.
        breakable: the descriptor is captured as a breakable graph.
        runtime_mode: the forward context's ``cudagraph_runtime_mode``.
        in_graph: the pass runs inside ``torch.cuda.graph``.
        raw: the context's ``attn_metadata``: "none", "complete", or which layers it lacks.
        operators: what the generic attention operator of each layer handed to its kernel.
        seen: metadata that ``get_attention_context`` returned, by the module that called it.
        microbatch: the same, in a context made inside this one and read by another thread.
        differences: what else ``get_attention_context`` returned that is not the layer's own.
    """

    manager: str
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
        descriptor = f"the {self.mode} descriptor of {self.num_tokens} tokens"
        return f"the {self.step} pass of {descriptor} ({self.manager})"


class Failure(Exception):
    """Raised by the model in the middle of a pass that is to fail."""


class Attention:
    """The attention layers of a loaded model, with recorders in place of their kernels.

    Attributes:
        layers: layer name to layer.
        importers: where ``get_attention_context`` is bound by name, to that binding.
        context: the module ``vllm.forward_context``.
    """

    def __init__(self, config: Any, importers: dict[str, Callable[[str], Any]]) -> None:
        registered = config.compilation_config.static_forward_context
        kind = attention_module().Attention
        self.config = config
        self.layers = {name: x for name, x in registered.items() if isinstance(x, kind)}
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
        """Run each layer on zeros; returns with which metadata its operator called the kernel."""
        self._given.clear()
        for _, layer in self._ready():
            query = torch.zeros(num_tokens, layer.num_heads * layer.head_size)
            key_or_value = torch.zeros(num_tokens, layer.num_kv_heads * layer.head_size)
            layer(query, key_or_value, key_or_value)
        return {name: self._describe(name, given) for name, given in self._given.items()}

    def raw(self) -> str:
        """Whether the context's own dictionary has metadata for every layer."""
        metadata = self.context.get_forward_context().attn_metadata
        if metadata is None:
            return NONE
        missing = [name for name in self.layers if metadata.get(name) is None]
        return "without " + ", ".join(missing) if missing else COMPLETE

    def look(self, found: Pass) -> None:
        """Ask ``get_attention_context`` about every layer, through each of its bindings."""
        for importer, get_attention_context in self.importers.items():
            answers = set()
            for name, layer in self._ready():
                metadata, *rest = get_attention_context(name)
                answers.add(self._describe(name, metadata))
                found.differences += [
                    f"{importer}: {what} of {name}" for what in self._differing(name, layer, rest)
                ]
            found.seen[importer] = joined(answers)

    def look_from_microbatch(self) -> str:
        """What a microbatch sees: its context is made here, as UBatchWrapper makes it, and read by
        a thread of its own."""
        active = self.context.get_forward_context()
        slots = {"slot_mapping": active.slot_mapping} if hasattr(active, "slot_mapping") else {}
        inner = self.context.create_forward_context(active.attn_metadata, self.config, **slots)
        get_attention_context = next(iter(self.importers.values()))
        answers: set[str] = set()

        def read() -> None:
            for name, _ in self._ready():
                answers.add(self._describe(name, get_attention_context(name)[0]))

        with self.context.override_forward_context(inner):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        return joined(answers)

    def serve(self, **context: Any) -> set[str]:
        """What operators and microbatches are given in the context of a batch outside a capture.

        Args:
            context: further arguments of ``set_forward_context``.
        """
        metadata = {name: SimpleNamespace() for name in self.layers}
        with self.context.set_forward_context(metadata, self.config, num_tokens=1, **context):
            answers = set(self.run(1).values())
            if self.importers:
                answers.add(self.look_from_microbatch())
        return answers

    def _ready(self) -> Iterator[tuple[str, Any]]:
        """The layers that the context has metadata for, all of them if it has none at all; the
        others would raise, and :meth:`raw` names them."""
        metadata = self.context.get_forward_context().attn_metadata
        for name, layer in self.layers.items():
            if metadata is None or name in metadata:
                yield name, layer

    def _describe(self, name: str, metadata: Any) -> str:
        raw = self.context.get_forward_context().attn_metadata
        if metadata is None:
            return NONE
        return METADATA if raw is not None and metadata is raw[name] else OTHER

    def _differing(self, name: str, layer: Any, rest: list[Any]) -> Iterator[str]:
        context = self.context.get_forward_context()
        kv_cache = layer.kv_cache
        if hasattr(context, "virtual_engine"):  # to 0.18.1
            kv_cache = kv_cache[context.virtual_engine]
        if rest[0] is not layer:
            yield "layer"
        if rest[1] is not kv_cache:
            yield "KV cache"
        if len(rest) > 2 and rest[2] is not context.slot_mapping.get(name):  # from 0.17.0
            yield "slot mapping"


class CudaGraphs:
    """Stands in for CUDA graphs: they record nothing, and streams order nothing.

    Attributes:
        capturing: a capture is active.
    """

    def __init__(self) -> None:
        self.capturing = False

    @contextlib.contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """In place of ``torch.cuda.graph``."""
        outer, self.capturing = self.capturing, True
        try:
            yield
        finally:
            self.capturing = outer

    def install(self) -> None:
        """Put the imitations in place.

        To be called after the runner is made: what it imports puts vLLM's own imitations in some
        of the same places, and those cannot capture.
        """
        graphs = self

        class Stream:
            def __init__(self, *args: Any, **kwargs: Any) -> None: ...
            def wait_stream(self, other: Any) -> None: ...
            def wait_event(self, event: Any) -> None: ...
            def record_event(self, event: Any = None) -> None: ...
            def synchronize(self) -> None: ...

        class Graph:
            def __init__(self, *args: Any, **kwargs: Any) -> None: ...
            def replay(self) -> None: ...
            def pool(self) -> tuple[int, int]:
                return (0, 1)

            def capture_begin(self, *args: Any, **kwargs: Any) -> None:
                graphs.capturing = True

            def capture_end(self) -> None:
                graphs.capturing = False

        stream = Stream()
        cuda: Any = torch.cuda
        cuda.Stream, cuda.CUDAGraph, cuda.graph = Stream, Graph, self.graph
        cuda.current_stream = lambda *args, **kwargs: stream
        cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
        cuda.graph_pool_handle = lambda *args, **kwargs: (0, 1)
        cuda.mem_get_info = lambda *args, **kwargs: (1 << 30, 1 << 30)
        accelerator: Any = torch.accelerator
        accelerator.get_memory_info = cuda.mem_get_info
        for owner in (cuda, accelerator):
            owner.empty_cache = owner.synchronize = lambda *args, **kwargs: None

        if has_module("vllm.compilation.breakable_cudagraph"):
            breakable: Any = importlib.import_module("vllm.compilation.breakable_cudagraph")
            breakable.weak_ref_tensor = lambda tensor: tensor

        platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
        platform.get_global_graph_pool = lambda self: (0, 1)
        platform.graph_pool_handle = classmethod(lambda cls: (0, 1))


class Recorder:
    """Follows captures: which descriptor they are at, and what each pass sees.

    Attributes:
        passes: every pass so far.
        fail_in: how many passes from now on succeed before one fails; None for no failure.
    """

    def __init__(self, attention: Attention, graphs: CudaGraphs) -> None:
        self.attention = attention
        self.passes: list[Pass] = []
        self.fail_in: int | None = None
        self._graphs = graphs
        self._manager = ""
        self._descriptor = ("", 0)
        self._step = 0
        self._breakable = False

    def follow(self, manager: Any) -> None:
        """Have a graph manager, of whatever release, tell which descriptor it captures.

        From 0.18.0 on managers loop over lists of descriptors, which tell when they are iterated
        over; before, each descriptor is a call of the method ``capture_graph``.
        """
        begin = self._begin
        name = type(manager).__name__
        if hasattr(manager, "_capture_descs"):
            breakable = getattr(manager, "use_breakable_cg", False)

            class Watched(list[Any]):
                def __iter__(self) -> Iterator[Any]:
                    for descriptor in super().__iter__():
                        begin(name, descriptor.cg_mode, descriptor.num_tokens, breakable)
                        yield descriptor

            for mode, descriptors in manager._capture_descs.items():
                manager._capture_descs[mode] = Watched(descriptors)
            return

        capture_graph = manager.capture_graph
        signature = inspect.signature(capture_graph)

        def watched(manager: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            # Before 0.17.0 there is no mode to choose: every graph is FULL.
            mode = arguments.get("capture_cg_mode", cpu.cudagraph_mode("FULL"))
            begin(name, mode, arguments["num_tokens"], False)
            return capture_graph(*args, **kwargs)

        manager.capture_graph = types.MethodType(watched, manager)

    def _begin(self, manager: str, mode: Any, num_tokens: int, breakable: bool) -> None:
        self._manager = manager
        self._descriptor = (mode.name, num_tokens)
        self._step = 0
        self._breakable = breakable and mode.name == "PIECEWISE"

    def record(self, num_tokens: int) -> None:
        """Called by the model in each forward pass, with its number of tokens.

        Raises:
            Failure: this is the pass that was to fail.
        """
        context = self.attention.context.get_forward_context()
        mode, size = self._descriptor
        found = Pass(
            manager=self._manager,
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
            found.microbatch = self.attention.look_from_microbatch()
        self._step += 1
        self.passes.append(found)
        if self.fail_in == 0:
            raise Failure(str(found))
        if self.fail_in is not None:
            self.fail_in -= 1

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """The passes of this block are not kept."""
        kept = len(self.passes)
        try:
            yield
        finally:
            del self.passes[kept:]


@dataclass
class Capture:
    """A capture that is ready to run, again and again.

    Attributes:
        kind: "runner" if the V2 runner made everything, "manager" if only the graph manager is
            vLLM's and what a runner would hand to it is imitated.
        manager: the graph manager of the model.
        run: captures the model.
        parts: what a runner hands to a manager's ``capture()``, by parameter name.
        importers: where ``get_attention_context`` is bound by name.
        not_importable: modules that bind it but do not import here, and why.
    """

    kind: str
    recorder: Recorder
    manager: Any
    run: Callable[[], Any]
    parts: dict[str, Any]
    importers: list[str]
    not_importable: dict[str, str]

    @property
    def attention(self) -> Attention:
        return self.recorder.attention

    def run_speculators(self) -> None:
        """Capture with the manager class of each speculator of this release."""
        for kind in speculator_managers():
            manager = _make_speculator_manager(kind, self.manager.vllm_config)
            self.recorder.follow(manager)
            forward = self._speculator_forward
            call(manager.capture, **self.parts, forward_fn=forward, generate_fn=forward)

    def _speculator_forward(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        cg_mode: Any,
        **steps: Any,
    ) -> None:
        """Where a speculator runs its draft model."""
        attention = self.attention
        with attention.context.set_forward_context(
            attn_metadata,
            attention.config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=cg_mode,
            slot_mapping=slot_mappings,
        ):
            self.recorder.record(num_tokens)

    def run_passes(self, forward: Callable[[Any], None]) -> bool:
        """Capture one PIECEWISE descriptor with a forward pass of the caller's.

        Args:
            forward: called with the ``cudagraph_runtime_mode`` of each pass.

        Returns:
            False where this release has no capture of PIECEWISE descriptors.
        """
        utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
        piecewise = cpu.cudagraph_mode("PIECEWISE")
        if not hasattr(self.manager, "_capture_descs"):
            if "capture_cudagraph_mode" not in inspect.signature(utils.capture_graphs).parameters:
                return False

            def capture_graph(manager: Any, size: int, mode: Any) -> None:
                forward(cpu.cudagraph_mode("NONE"))
                forward(mode)

            method = types.MethodType(capture_graph, self.manager)
            utils.capture_graphs({1: 1}, DEVICE, method, piecewise)
            return True

        manager = _make_manager(utils.CudaGraphManager, self.manager.vllm_config, MODE)
        manager._capture_descs = {piecewise: manager._capture_descs[piecewise][-1:]}
        # From 0.21.0 to 0.25.1 the factory returns the attention state as well.
        pair = any(
            hasattr(utils, name) for name in ("CapturedAttentionState", "AttentionStatePair")
        )
        manager.capture(lambda *args, **kwargs: (forward, None) if pair else forward)
        return True

    def forget_graphs(self) -> None:
        """Let the model be captured anew."""
        self.manager.graphs.clear()


def prepare(config: Any) -> Capture:
    """Set up the capture of a model's graphs, with everything of the runner's that runs here.

    Args:
        config: a ``VllmConfig``, active in this process (:func:`cpu.single_process_group`).

    Raises:
        ModuleNotFoundError: this release has no V2 runner.
    """
    importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    if has_module("vllm.v1.worker.cpu.model_runner"):
        return _prepare_runner(config)
    return _prepare_manager(config)


def _prepare_runner(config: Any) -> Capture:
    # Where the worker of a CPU imports it: vLLM's own replacements for what V2 asks of torch.cuda.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    runner_module = importlib.import_module("vllm.v1.worker.cpu.model_runner")
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(DEVICE)
    runner = runner_module.CPUModelRunner(config, DEVICE)
    runner.load_model()
    runner.initialize_kv_cache(cpu.kv_cache_config(config, runner.get_kv_cache_spec()))
    graphs = CudaGraphs()
    graphs.install()
    # The runner made itself a manager for the mode of a CPU.
    _configure(config)
    runner.cudagraph_manager = _make_manager(utils.ModelCudaGraphManager, config, MODE)
    importers, not_importable = import_all("get_attention_context")
    recorder = Recorder(Attention(config, importers), graphs)
    runner.model = _make_model(recorder, runner.model)
    recorder.follow(runner.cudagraph_manager)
    parts = {
        **_speculator_parts(config),
        "model_state": runner.model_state,
        "input_buffers": runner.input_buffers,
        "block_tables": runner.block_tables,
        "attn_groups": runner.attn_groups,
        "kv_cache_config": runner.kv_cache_config,
    }
    _keep_attention_states(runner.cudagraph_manager, parts)
    return Capture(
        kind="runner",
        recorder=recorder,
        manager=runner.cudagraph_manager,
        run=runner.capture_model,
        parts=parts,
        importers=list(importers),
        not_importable=not_importable,
    )


def _prepare_manager(config: Any) -> Capture:
    importlib.import_module("vllm.model_executor.model_loader").get_model(vllm_config=config)
    graphs = CudaGraphs()
    graphs.install()
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    buffers = importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBuffers
    _configure(config)
    importers, not_importable = import_all("get_attention_context")
    recorder = Recorder(Attention(config, importers), graphs)
    kind = getattr(utils, "ModelCudaGraphManager", None) or utils.CudaGraphManager
    manager = _make_manager(kind, config, MODE)
    recorder.follow(manager)
    max_num_tokens = config.scheduler_config.max_num_batched_tokens
    names = list(recorder.attention.layers)
    parts = {
        **_speculator_parts(config),
        "model": _make_model(recorder),
        "model_state": _ModelState(names),
        "input_buffers": call(
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
        "block_tables": _BlockTables(max_num_tokens),
        "attn_groups": [],
        "attn_metadata_builders": [_MetadataBuilder()],
        "kv_cache_config": SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=names)], num_blocks=8
        ),
    }
    _keep_attention_states(manager, parts)
    return Capture(
        kind="manager",
        recorder=recorder,
        manager=manager,
        run=lambda: call(manager.capture, **parts),
        parts=parts,
        importers=list(importers),
        not_importable=not_importable,
    )


def _configure(config: Any) -> None:
    """Give a configuration, which is eager on a CPU, what it has where graphs are captured."""
    cpu.set_cudagraph_mode(config, MODE, SIZES)
    kernels: Any = getattr(config, "kernel_config", None)
    if hasattr(kernels, "enable_jit_warmup"):
        kernels.enable_jit_warmup = True


def _make_manager(kind: type[Any], config: Any, mode: str) -> Any:
    return call(
        kind,
        vllm_config=config,
        device=DEVICE,
        cudagraph_mode=cpu.cudagraph_mode(mode),
        decode_query_len=1,
        uses_mrope=False,
        use_aux_hidden_state_outputs=False,
        causal=False,
        draft_tokens=torch.zeros(MAX_NUM_SEQS, 1, dtype=torch.int64),
    )


def _make_speculator_manager(kind: type[Any], config: Any) -> Any:
    """A speculator's manager, with PIECEWISE descriptors where it can have them."""
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    if not issubclass(kind, utils.CudaGraphManager):
        # To 0.17.1 it takes the configuration's mode for decoding.
        cpu.set_cudagraph_mode(config, "PIECEWISE", SIZES)
        try:
            return _make_manager(kind, config, "PIECEWISE")
        finally:
            cpu.set_cudagraph_mode(config, MODE, SIZES)
    try:
        return _make_manager(kind, config, MODE)
    except AssertionError:  # 0.18.0 to 0.19.1: FULL only
        return _make_manager(kind, config, "FULL_DECODE_ONLY")


def _speculator_parts(config: Any) -> dict[str, Any]:
    return {
        "max_model_len": config.model_config.max_model_len,
        "causal": False,
        "prepare_forward": lambda num_reqs, attn_metadata: None,  # dflash, 0.32
        "precompute_context_kv": lambda num_reqs: None,  # dflash, 0.31
    }


def _keep_attention_states(manager: Any, parts: dict[str, Any]) -> None:
    """From 0.21.0 to 0.25.1 a speculator captures with what the model's capture returned."""
    capture = manager.capture

    def keeping(*args: Any, **kwargs: Any) -> Any:
        states = capture(*args, **kwargs)
        parts["full_cg_attn_states"] = parts["attn_states"] = states
        return states

    # The signature decides what a caller passes.
    keeping.__signature__ = inspect.signature(capture)  # type: ignore[attr-defined]
    manager.capture = keeping


def _make_model(recorder: Recorder, runner_model: Any = None) -> torch.nn.Module:
    """The model to capture: it runs the attention layers and nothing else.

    Args:
        recorder: is told of each forward pass.
        runner_model: the runner's own model, for whatever else the runner asks of it.
    """
    bases: list[type] = [torch.nn.Module]
    with contextlib.suppress(ImportError, AttributeError):
        # From 0.30.0 on a PIECEWISE capture insists on a model with a compiled part.
        wrapper = importlib.import_module("vllm.compilation.wrapper")
        bases.append(wrapper.TorchCompileWithNoGuardsWrapper)

    class Model(*bases):  # type: ignore[misc]
        do_not_compile = False
        __call__ = torch.nn.Module.__call__

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
            recorder.record(len(positions))
            return torch.zeros(len(positions), cpu.LLAMA["hidden_size"])

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(runner_model, name)

    model: torch.nn.Module = Model()
    return model


class _ModelState:
    """Metadata for every layer, as a runner's model state makes it (from 0.17.0)."""

    max_model_len = 128
    supports_mm_inputs = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: SimpleNamespace() for name in self.names}


class _MetadataBuilder:
    """Metadata for one group of layers, as a backend makes it (before 0.17.0)."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace()


class _BlockTables:
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


def speculator_managers() -> list[type[Any]]:
    """The graph manager classes of this release's speculators that capture."""
    folder = package_folder() / "v1" / "worker" / "gpu" / "spec_decode"
    found = []
    for path in sorted(folder.rglob("cudagraph*.py")):
        module = importlib.import_module(module_name(path))
        found += [
            kind
            for name, kind in vars(module).items()
            if name.endswith("CudaGraphManager")
            and kind.__module__ == module.__name__
            and "capture" in vars(kind)
        ]
    return found


def attention_module() -> Any:
    """The module that defines the generic attention layer."""
    name = "vllm.model_executor.layers.attention.attention"
    return importlib.import_module(name if has_module(name) else "vllm.attention.layer")


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call ``function`` with those of ``arguments`` that it has in this release.

    Raises:
        TypeError: it needs one that is not among them.
    """
    known = dict(inspect.signature(function).parameters)
    passed_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    if passed_on and isinstance(function, type):
        known |= inspect.signature(function.__bases__[0]).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})


def joined(answers: set[str]) -> str:
    """One string for what several layers were given; normally they all were given the same."""
    return " and ".join(sorted(answers))
