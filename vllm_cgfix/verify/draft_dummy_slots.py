"""The reproduction of ``draft-dummy-slots``: dummy batches draft into blocks of earlier requests.

``python -m vllm_cgfix.verify.draft_dummy_slots``

Requests have left their blocks in the block tables, by request state. A dummy batch is then
drafted for, and what the drafter's model sees as its slots in each pass is recorded: beside real
batches of the same shape, with and without CUDA graphs.

Real are ``propose`` and what it calls: the speculators (made without their constructors),
``BlockTables``, the input buffers and batches, and the source of the Triton kernels, which a small
interpreter runs. Imitated are the platform, the model, metadata builders, the agreement among ranks
on a graph, and the graphs: a FULL graph is replayed by running what was captured, on the buffers
that it was captured with.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch

from . import cpu
from .importers import has_module
from .report import columns, outcome, requirement, run
from .v2_capture import DEVICE, call

SPECULATORS = {
    "EagleSpeculator": "eagle",
    "MTPSpeculator": "mtp",
    "Gemma4Speculator": "gemma4",
}
"""Those that draft one token a step, and their package."""
PAD = -1

STEPS = 4
"""Draft tokens: the first one is drafted by the pass that is called the prefill."""
STATES = (5, 2, 6)
"""Request states of the real batch; a dummy batch of 3 requests is given 0, 1 and 2."""
SEQ_LENS = (9, 22, 64)
"""The last one is as long as can be, and another one comes to the end of a block."""
REJECTED = (0, 1, 0)
MAX_NUM_REQS = 8
MAX_NUM_TOKENS = 32
MAX_MODEL_LEN = 64
BLOCK_SIZES = (4, 8)
"""Of each KV cache group."""
HIDDEN_SIZE = 2
VOCAB_SIZE = 3

NUM_REQS = len(STATES)
QUERY_LEN = STEPS + 1
NUM_TOKENS = NUM_REQS * QUERY_LEN

Slots = list[list[int]]
"""The slots of one pass, by KV cache group."""


@dataclass(frozen=True)
class Mode:
    """How the drafter's passes are run: the prefill, and each later draft step."""

    prefill: str
    decode: str

    @property
    def prefill_size(self) -> tuple[int, int | None]:
        """Tokens, and requests where the graph is for a number of them."""
        full, other = (NUM_TOKENS + QUERY_LEN, NUM_REQS + 1), (NUM_TOKENS, None)
        return full if self.prefill == "FULL" else other

    @property
    def decode_size(self) -> tuple[int, int | None]:
        """The same of a draft step."""
        return (NUM_REQS + 1, NUM_REQS + 1) if self.decode == "FULL" else (NUM_REQS, None)

    def __str__(self) -> str:
        return f"prefill {self.prefill}, draft steps {self.decode}"


MODES = (Mode("FULL", "FULL"), Mode("PIECEWISE", "NONE"), Mode("NONE", "NONE"))


@dataclass
class Batch:
    """One batch that was drafted for.

    Attributes:
        speculator: the class, and whether its draft steps are fused into one graph.
        mode: how the passes were run.
        kind: "real", "dummy" or "profile", which is a dummy batch without attention.
        passes: the slots in the forward context of each pass; none for a batch without attention.
        expected: those of a real batch, computed from its blocks.
        built: the slots with which attention metadata was built for the later draft steps.
        dispatches: the arguments with which the ranks were asked for a graph.
    """

    speculator: str
    mode: str
    kind: str
    passes: list[Slots] = field(default_factory=list)
    expected: list[Slots] = field(default_factory=list)
    built: list[Slots] = field(default_factory=list)
    dispatches: list[str] = field(default_factory=list)

    @property
    def slots(self) -> list[Slots]:
        """Where a drafter that writes K/V does so, in each pass."""
        return [[[s for s in group if s != PAD] for group in slots] for slots in self.passes]

    @property
    def steps_with_slots(self) -> list[int]:
        """The draft steps after the first that have any, counted from 1."""
        return [step for step, slots in enumerate(self.slots, 1) if step > 1 and any(slots)]

    def __str__(self) -> str:
        return f"{self.speculator}, {self.mode}, {self.kind} batch"


def reproduce() -> dict[str, Any]:
    """Draft with the importable vLLM; this process must not have imported it.

    Returns:
        The keys of :class:`vllm_cgfix.verify.Outcome`. ``observations`` has ``batches``, each as in
        :class:`Batch`, and ``explanation`` (why there is no fault to be seen here, or "").
    """
    cpu.use_cpu_platform()
    config = cpu.make_config(max_model_len=MAX_MODEL_LEN)  # registers the plugin
    speculators = _speculators()
    explanation = _unexamined(speculators)
    if explanation:
        return _outcome([], [], explanation)
    batches = [
        batch
        for speculator, fused in itertools.product(speculators, (False, True))
        if not fused or hasattr(speculator, "_fused_multi_step_decode")
        for batch in _drafted(speculator, config, fused)
    ]
    return _outcome(batches, _requirements(batches), "")


def _speculators() -> list[Any]:
    """The classes of this release."""
    names = {
        name: f"vllm.v1.worker.gpu.spec_decode.{package}.speculator"
        for name, package in SPECULATORS.items()
    }
    return [
        getattr(importlib.import_module(module), name)
        for name, module in names.items()
        if has_module(module)
    ]


def _unexamined(speculators: Sequence[Any]) -> str:
    """Why the speculators are not examined here; "" where they are."""
    if not has_module("vllm.v1.worker.gpu"):
        return "this release has no V2 model runner"
    if not speculators:
        return "this release's V2 runner does not draft for dummy batches"
    if _pads_unknown_requests():
        return ""
    not_fixed = "not fixed here: the slots of draft steps are computed inside the captured graph"
    eager = ("multi_step_decode", "_multi_step_decode")
    if not any(hasattr(speculators[0], name) for name in eager):
        return not_fixed
    if hasattr(speculators[0], "_fused_multi_step_decode"):
        return f"{not_fixed}, with attention backends that can update their metadata in it"
    return ""


def _pads_unknown_requests() -> bool:
    """Whether the slots of a request that is not known (-1) are -1, as upstream's fix needs it."""
    tables = _block_tables()
    slots = call(
        tables.compute_slot_mappings,
        idx_mapping=torch.tensor([-1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        positions=torch.tensor([0]),
        num_tokens_padded=1,
    )
    return bool((slots == PAD).all())


# --- Triton kernels ---------------------------------------------------------------------------


class _Pointer:
    """A pointer into a tensor, or several: ``offset`` is a number or a tensor of them."""

    def __init__(self, flat: torch.Tensor, offset: Any):
        self.flat = flat
        self.offset = offset

    @classmethod
    def to(cls, tensor: torch.Tensor) -> _Pointer:
        """To the first element; what is before it and behind it in memory is in reach."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.flat, self.offset + more)

    def __sub__(self, fewer: Any) -> _Pointer:
        return _Pointer(self.flat, self.offset - fewer)


class _Language:
    """As much of ``triton.language`` as the kernels use, for one program at a time."""

    int32 = torch.int32
    int64 = torch.int64
    arange = staticmethod(torch.arange)

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...]):
        self._program = program
        self._grid = grid

    def program_id(self, axis: int) -> int:
        """The number of this program."""
        return self._program[axis]

    def num_programs(self, axis: int) -> int:
        """How many programs there are."""
        return self._grid[axis]

    @staticmethod
    def load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
        """The elements; ``other`` where there is no mask."""
        offset, there = torch.broadcast_tensors(
            torch.as_tensor(pointer.offset), torch.as_tensor(mask)
        )
        found = pointer.flat[torch.where(there, offset, 0)]
        return torch.where(there, found, other).to(found.dtype)

    @staticmethod
    def store(pointer: _Pointer, value: Any, mask: Any = True) -> None:
        """Write the elements that the mask lets."""
        offset, new, there = torch.broadcast_tensors(
            torch.as_tensor(pointer.offset), torch.as_tensor(value), torch.as_tensor(mask)
        )
        pointer.flat[offset[there]] = new[there].to(pointer.flat.dtype)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> torch.Tensor:
        """Element by element, of tensors or numbers."""
        return torch.where(*map(torch.as_tensor, (condition, x, y)))

    @staticmethod
    def minimum(x: Any, y: Any) -> torch.Tensor:
        """Element by element, of tensors or numbers."""
        return torch.minimum(torch.as_tensor(x), torch.as_tensor(y))


class _Kernel:
    """The source of a Triton kernel, run program after program."""

    by_address: ClassVar[dict[int, torch.Tensor]] = {}
    """The tensors of which kernels are handed addresses."""

    def __init__(self, kernel: Any):
        self.function: FunctionType = getattr(kernel, "fn", kernel)  # where Triton is installed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            given = [_Pointer.to(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            for program in itertools.product(*map(range, grid)):
                names = {"tl": _Language(program, grid), "_load_ptr": self._load_ptr}
                function = self.function
                FunctionType(function.__code__, {**function.__globals__, **names})(
                    *given, **constants
                )

        return launch

    def _load_ptr(self, pointer: _Pointer, elem_dtype: torch.dtype) -> _Pointer:
        tensor = self.by_address[int(pointer.flat[int(pointer.offset)])]
        assert tensor.dtype == elem_dtype
        return _Pointer.to(tensor)


def _interpret_kernels(module: Any) -> None:
    for name, member in [*vars(module).items()]:
        if name.endswith("_kernel") and not isinstance(member, _Kernel):
            setattr(module, name, _Kernel(member))


# --- block tables -----------------------------------------------------------------------------


class _DeviceBuffer:
    """A buffer of which only the device's side is used: ``StagedWriteTensor`` and others."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, **_: Any):
        self.gpu = torch.zeros(size, dtype=dtype)


def _block_tables() -> Any:
    """``BlockTables`` in which each request state has left blocks of its own."""
    module: Any = importlib.import_module("vllm.v1.worker.gpu.block_table")
    _interpret_kernels(module)
    for name in ("StagedWriteTensor", "UvaBackedTensor"):
        setattr(module, name, _DeviceBuffer)
    module.FusedStagedWriter = lambda *_: None  # from 0.24
    tables = call(
        module.BlockTables,
        block_sizes=[*BLOCK_SIZES],
        kernel_block_sizes=[*BLOCK_SIZES],
        max_num_reqs=MAX_NUM_REQS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_blocks_per_group=[MAX_MODEL_LEN // size for size in BLOCK_SIZES],
        device=DEVICE,
        pin_memory=False,
    )
    for table in tables.block_tables:
        _Kernel.by_address[table.gpu.data_ptr()] = table.gpu
        # Block 0 is the null block.
        table.gpu.copy_(1 + torch.arange(table.gpu.numel()).view_as(table.gpu))
    return tables


def _slots_of(tables: Any, state: int, positions: Sequence[int]) -> Slots:
    """The slots of a request's positions, by KV cache group."""
    rows = [table.gpu[state].tolist() for table in tables.block_tables]
    return [
        [row[position // size] * size + position % size for position in positions]
        for row, size in zip(rows, BLOCK_SIZES, strict=True)
    ]


# --- speculators ------------------------------------------------------------------------------

LAYERS = ("draft.0", "draft.1")
"""One for each KV cache group."""
KV_CACHE_CONFIG = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(layer_names=[layer]) for layer in LAYERS]
)


class _AttentionGroup:
    """An ``AttentionGroup`` and its metadata builder, whose metadata are what they are made of."""

    supports_update_block_table = False

    def __init__(self, kv_cache_group_id: int, built: Callable[[int, Any], None]):
        self.kv_cache_group_id = kv_cache_group_id
        self.layer_names = [LAYERS[kv_cache_group_id]]
        self.built = built

    def get_metadata_builder(self, ubatch_id: int) -> _AttentionGroup:
        """The builder of a microbatch: there is one."""
        return self

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> Any:
        self.built(self.kv_cache_group_id, common_attn_metadata)
        return common_attn_metadata

    def build_metadata(self, common_attn_metadata: Any, ubatch_id: int, **_: Any) -> Any:
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, attn_metadata: Any) -> None: ...

    def map_to_kernel_block_table(self, block_table: torch.Tensor) -> None: ...


class _Graphs:
    """A graph manager: it replays what it was told to capture."""

    def __init__(self, forward: Callable[..., Any], tables: Any):
        self.forward = forward
        self.tables = tables

    def run_fullgraph(self, desc: Any) -> None:
        # Its arguments at capture: the persistent buffers.
        slots = self.tables.slot_mappings[:, : desc.num_tokens]
        by_layer = dict(zip(LAYERS, slots, strict=True))
        call(
            self.forward,
            num_reqs=desc.num_reqs,
            num_tokens=desc.num_tokens,
            num_tokens_padded=desc.num_tokens,
            attn_metadata={k: SimpleNamespace(slot_mapping=v) for k, v in by_layer.items()},
            slot_mappings=by_layer,
            num_tokens_across_dp=None,
            cudagraph_runtime_mode=cpu.cudagraph_mode("NONE"),
            num_speculative_steps=STEPS,
        )

    def run_pw_graph(self, model: Any, model_inputs: dict[str, Any]) -> Any:
        return model(**model_inputs)

    def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:  # from 0.32
        return desc


class _Drafting:
    """A speculator in a mode, and the batch that is being drafted for."""

    def __init__(self, kind: Any, config: Any, mode: Mode, *, fused: bool):
        self.mode = mode
        self.name = kind.__name__ + " with fused steps" * fused
        self.batch: Batch
        self.context: Any = importlib.import_module("vllm.forward_context")
        self.inputs: Any = importlib.import_module("vllm.v1.worker.gpu.input_batch")
        self.tables = _block_tables()
        self.speculator: Any = object.__new__(kind)
        for module in {owner.__module__ for owner in kind.__mro__ if owner is not object}:
            _interpret_kernels(sys.modules[module])
            if hasattr(sys.modules[module], "dispatch_cg_and_sync_dp"):
                vars(sys.modules[module])["dispatch_cg_and_sync_dp"] = self._dispatch
        vars(self.speculator).update(self._attributes(config), **self._methods(fused))

    def _attributes(self, config: Any) -> dict[str, Any]:
        """What the constructors and ``load_model`` of any release set."""
        groups = [[_AttentionGroup(i, self._note_metadata)] for i in range(len(LAYERS))]
        arange = torch.arange(MAX_NUM_REQS + 1, dtype=torch.int32)
        return {
            "vllm_config": config,
            "device": DEVICE,
            "method": "eagle",
            "num_speculative_steps": STEPS,
            "max_num_reqs": MAX_NUM_REQS,
            "max_num_tokens": MAX_NUM_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "dp_size": 2,
            "dp_rank": 0,
            "dcp_size": 1,
            "pcp_manager": None,
            "eplb_state": None,
            "acceptance_estimator": None,
            "supports_mm_inputs": False,
            "inputs_embeds": None,
            "use_local_argmax_reduction": False,
            "draft_logits": None,
            "draft_attn_layer_names": {*LAYERS},
            "attn_groups": groups,
            "kv_cache_config": KV_CACHE_CONFIG,
            "block_tables": self.tables,
            "model": self,
            "input_buffers": self._input_buffers(),
            "hidden_states": torch.zeros(MAX_NUM_TOKENS, HIDDEN_SIZE),
            "idx_mapping": torch.zeros(MAX_NUM_REQS, dtype=torch.int32),
            "temperature": torch.zeros(MAX_NUM_REQS),
            "seeds": torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            "draft_tokens": torch.zeros(MAX_NUM_REQS, STEPS, dtype=torch.int64),
            "current_draft_step": torch.tensor(0),
            "last_token_indices": torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            "sample_src_positions": torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            "draft_is_prefilling": torch.zeros(MAX_NUM_REQS, dtype=torch.bool),
            "arange": arange,
            "arange_np": arange.numpy(),
        }

    def _methods(self, fused: bool) -> dict[str, Any]:
        """What is captured, and how the draft steps are run."""
        prefill = getattr(self.speculator, "_prefill", None) or self.speculator.prefill
        draft = getattr(self.speculator, "_generate_draft", None) or (
            self.speculator.generate_draft  # up to 0.22
        )
        if fused:
            draft = self.speculator._generate_fused_drafts
        return {
            "prefill_cudagraph_manager": _Graphs(prefill, self.tables),
            "decode_cudagraph_manager": _Graphs(draft, self.tables),
            "use_fused_multi_step_decode": fused,  # 0.31
            "supports_decode_metadata_update": fused,  # from 0.32
        }

    def _input_buffers(self) -> Any:
        return call(
            self.inputs.InputBuffers,
            max_num_reqs=MAX_NUM_REQS,
            max_num_tokens=MAX_NUM_TOKENS,
            device=DEVICE,
        )

    # What the speculator calls.

    def __call__(self, **inputs: Any) -> Any:
        slots = self.context.get_forward_context().slot_mapping
        self.batch.passes.append([slots[layer].tolist() for layer in LAYERS] if slots else [])
        hidden_states = inputs["hidden_states"]
        # 0.23 and 0.24 go by the kind of drafter, later releases by what they get.
        as_tuple = getattr(self.speculator, "model_returns_tuple", True)
        return (hidden_states, hidden_states) if as_tuple else hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden_states), VOCAB_SIZE)

    def _note_metadata(self, group: int, metadata: Any) -> None:
        if group == 0:
            self.batch.built.append([])
        self.batch.built[-1].append(metadata.slot_mapping.tolist())

    def _dispatch(self, manager: Any, num_reqs: int, num_tokens: int, *args: Any, **kw: Any) -> Any:
        prefill = manager is self.speculator.prefill_cudagraph_manager
        mode, (tokens, reqs) = (
            (self.mode.prefill, self.mode.prefill_size)
            if prefill
            else (self.mode.decode, self.mode.decode_size)
        )
        self.batch.dispatches.append(f"{num_reqs} requests, {num_tokens} tokens")
        descriptor = importlib.import_module(
            "vllm.v1.worker.gpu.cudagraph_utils"
        ).BatchExecutionDescriptor(cpu.cudagraph_mode(mode), tokens, reqs)
        return descriptor, None

    # Batches.

    def draft(self, kind: str) -> Batch:
        """Draft for a batch as the runner does, after it has run the target model on it."""
        self.batch = Batch(self.name, str(self.mode), kind)
        make_dummy = self.inputs.InputBatch.make_dummy
        input_batch = make_dummy(NUM_REQS, NUM_TOKENS, self._input_buffers())
        slots = None
        if kind == "real":
            slots = self._make_real(input_batch)
        elif kind == "dummy":
            slots = self.tables.get_dummy_slot_mappings(self.mode.prefill_size[0])
        self.speculator.propose(
            input_batch=input_batch,
            attn_metadata=None,
            slot_mappings=dict(zip(LAYERS, slots, strict=True)) if slots is not None else None,
            last_hidden_states=torch.zeros(NUM_TOKENS, HIDDEN_SIZE),
            aux_hidden_states=None,
            num_sampled=torch.ones(NUM_REQS, dtype=torch.int32),
            num_rejected=torch.tensor(REJECTED if kind == "real" else [0] * NUM_REQS),
            last_sampled=torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            next_prefill_tokens=torch.zeros(MAX_NUM_REQS, dtype=torch.int32),
            temperature=torch.zeros(MAX_NUM_REQS),
            seeds=torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            dummy_run=kind != "real",
            skip_attn_for_dummy_run=kind == "profile",
            is_profile=kind == "profile",
        )
        return self.batch

    def _make_real(self, input_batch: Any) -> torch.Tensor:
        """Make a batch that of live requests, and return the target model's slots."""
        states = torch.tensor(STATES, dtype=input_batch.idx_mapping.dtype)
        positions = [[*range(length - QUERY_LEN, length)] for length in SEQ_LENS]
        input_batch.idx_mapping = states
        input_batch.positions.copy_(torch.tensor(positions).flatten())
        input_batch.seq_lens.copy_(torch.tensor(SEQ_LENS))
        input_batch.seq_lens_cpu_upper_bound = torch.tensor(SEQ_LENS, dtype=torch.int32)
        self.batch.expected = self._expected(positions)
        slots: torch.Tensor = self.tables.compute_slot_mappings(
            states,
            input_batch.query_start_loc,
            input_batch.positions,
            self.mode.prefill_size[0],
        )
        return slots

    def _expected(self, positions: Sequence[Sequence[int]]) -> list[Slots]:
        advance = getattr(self.speculator, "advance_draft_positions", True)
        lasts = [length - 1 - n for length, n in zip(SEQ_LENS, REJECTED, strict=True)]
        by_pass = [positions] + [
            [[min(last + step * advance, MAX_MODEL_LEN - 1)] for last in lasts]
            for step in range(1, STEPS)
        ]
        return [
            [
                [*itertools.chain.from_iterable(groups)]
                for groups in zip(
                    *(_slots_of(self.tables, s, p) for s, p in zip(STATES, each, strict=True)),
                    strict=True,
                )
            ]
            for each in by_pass
        ]


def _drafted(kind: Any, config: Any, fused: bool) -> Iterator[Batch]:
    """Batches of every kind, in every mode; the profile run comes before there are block tables."""
    for mode in MODES:
        drafting = _Drafting(kind, config, mode, fused=fused)
        if mode == Mode("NONE", "NONE"):
            del drafting.speculator.block_tables, drafting.speculator.kv_cache_config
            yield drafting.draft("profile")
            vars(drafting.speculator).update(
                block_tables=drafting.tables, kv_cache_config=KV_CACHE_CONFIG
            )
        for batch in ("real", "dummy", "real"):
            yield drafting.draft(batch)


# --- the result -------------------------------------------------------------------------------


def _faults(batches: Sequence[Batch]) -> list[str]:
    """One sentence for each kind of dummy batch whose later draft steps have slots."""
    return [
        f"{batch}: draft step {step} has slots of earlier requests:"
        f" {', '.join(map(str, batch.slots[step - 1]))}"
        for batch in batches
        if batch.kind != "real"
        for step in batch.steps_with_slots[:1]
    ]


def _requirements(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """What has to hold of every batch."""
    return [
        _requirement(
            "each draft step of a real batch has the slots of its own blocks",
            batches,
            _foreign_slots,
        ),
        _requirement("the first draft pass of a dummy batch has no slots", batches, _prefilled),
        _requirement(
            "the ranks are asked as often, and for the same, and each token has its pass",
            batches,
            _other_shape,
        ),
        _requirement(
            "attention metadata is built on the slots of the step", batches, _other_metadata
        ),
        _requirement("a profile run has neither slots nor metadata", batches, _profiled),
    ]


def _foreign_slots(batch: Batch) -> list[str]:
    if batch.kind != "real":
        return []
    return [
        f"{found} in draft step {step}, not {expected}"
        for step, (found, expected) in enumerate(
            zip(batch.slots, batch.expected, strict=True), start=1
        )
        if found != expected
    ]


def _prefilled(batch: Batch) -> list[str]:
    first = batch.slots[0]
    return [f"slots {first}"] if batch.kind == "dummy" and any(first) else []


def _other_shape(batch: Batch) -> list[str]:
    asked = [f"{NUM_REQS} requests, {tokens} tokens" for tokens in (NUM_TOKENS, NUM_REQS)]
    wrong = [] if batch.dispatches == asked else [f"asked for {batch.dispatches}"]
    return wrong if len(batch.passes) == STEPS else [*wrong, f"{len(batch.passes)} passes"]


def _other_metadata(batch: Batch) -> list[str]:
    if batch.kind == "profile":
        return []
    if not batch.built and "draft steps FULL" not in batch.mode:
        return ["there is none"]
    # It is built once only where it is updated in place, or the same for all steps.
    steps = zip(batch.built, batch.passes[1:], strict=False)
    return [
        f"{built} in draft step {step}, not {seen}"
        for step, (built, seen) in enumerate(steps, start=2)
        if built != [group[: len(built[0])] for group in seen]
    ]


def _profiled(batch: Batch) -> list[str]:
    found = [*filter(None, batch.passes), *batch.built]
    return [f"{found}"] if batch.kind == "profile" and found else []


def _requirement(
    name: str, batches: Sequence[Batch], wrong_in: Callable[[Batch], list[str]]
) -> dict[str, Any]:
    wrong = [f"{batch}: {', '.join(wrong)}" for batch in batches if (wrong := wrong_in(batch))]
    return requirement(name, wrong, f"{len(batches)} batches")


def _outcome(
    batches: Sequence[Batch], requirements: list[dict[str, Any]], explanation: str
) -> dict[str, Any]:
    observations = {
        "explanation": explanation,
        "batches": [dataclasses.asdict(batch) for batch in batches],
    }
    text = columns(_rows(batches), requirements, explanation)
    return outcome(_faults(batches), requirements, observations, text)


def _rows(batches: Sequence[Batch]) -> list[list[str]]:
    """The slots of the later draft steps of each batch, in the first KV cache group."""
    rows = [["speculator", "mode", "batch", "slots in draft steps 2 and on"]]
    for batch in batches:
        slots = [groups[0] if groups else [] for groups in batch.slots[1:]]
        steps = "; ".join(str(found) if found else "-" for found in slots)
        rows.append([batch.speculator, batch.mode, batch.kind, steps])
    return rows


if __name__ == "__main__":
    sys.exit(run(__doc__, reproduce))
