"""The reproduction of ``dummy-lengths``: one request of a dummy batch is longer than it must be.

A dummy batch has as many requests as there can be, and its tokens are divided among them. With
``ceil(num_tokens / num_reqs)`` tokens each they are as short as can be; a request that has more
can be longer than ``max_model_len``, which nothing but the number of tokens and requests bounds
here.

Real are all places where the V2 runner divides: ``InputBatch.make_dummy`` with its
``InputBuffers``, ``GPUModelRunner._dummy_run`` up to the step that it starts,
``prepare_inputs_to_capture`` up to the attention metadata, and the LoRA hook of the capture.
Imitated are the platform and what these hand the lengths to: the step itself, metadata builders,
and the adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import cpu
from .importers import has_module
from .report import columns, outcome, requirement, run
from .v2_capture import DEVICE, call

SIZES = (
    *((496, 256), (2048, 256), (2047, 256), (512, 300)),
    *((7, 3), (64, 64), (1, 1), (8192, 1024), (8191, 1024)),
)
"""Tokens of a dummy batch and the most requests that it can have."""
MAX_MODEL_LEN = 16
"""Enough for an equal share of each of them."""
UNIFORM_QUERY_LEN = 4
MORE_REQS = 3
"""Entries of the persistent buffers that are not of the batch."""
STALE = 77
"""What earlier batches have left in the persistent buffers."""


@dataclass
class Division:
    """How one place divides the tokens of one dummy batch among its requests.

    Attributes:
        place: the function.
        num_tokens: tokens of the batch.
        lengths: by the name of each array that tells them, the requests' numbers of tokens.
        wrong: what else of the result is not as it must be.
    """

    place: str
    num_tokens: int
    lengths: dict[str, list[int]]
    wrong: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return max(map(len, self.lengths.values()))

    @property
    def longest(self) -> int:
        """Tokens of the longest request, in whichever array it is longest."""
        return max(itertools.chain.from_iterable(self.lengths.values()))

    @property
    def allowed(self) -> int:
        """An equal share, rounded up."""
        return -(-self.num_tokens // self.num_reqs)

    @property
    def even(self) -> list[int]:
        """The shares of 0.27.0: the last requests have one token more."""
        share, longer = divmod(self.num_tokens, self.num_reqs)
        return [share] * (self.num_reqs - longer) + [share + 1] * longer

    def __str__(self) -> str:
        return f"{self.place} of {self.num_tokens} tokens for {self.num_reqs} requests"


def reproduce() -> dict[str, Any]:
    """Divide with the importable vLLM; this process must not have imported it.

    Returns:
        The keys of :class:`vllm_cgfix.verify.Outcome`. ``observations`` has ``divisions`` (place,
        tokens, requests, and by array the lengths, such as ``"255 x 1, 1 x 241"``) and
        ``explanation`` (why there can be no fault here, or "").
    """
    cpu.use_cpu_platform()
    cpu.make_config()  # registers the plugin
    if not has_module("vllm.v1.worker.gpu"):
        return _outcome([], [], "this release has no V2 model runner")
    importlib.import_module("vllm.v1.worker.gpu.model_runner")
    divisions = [
        observe(num_tokens, max_num_reqs)
        for observe in _places()
        for num_tokens, max_num_reqs in SIZES
    ]
    divisions.append(_dummy_run(64, 256, uniform_decode=True))
    return _outcome(divisions, _requirements(divisions), "")


def _places() -> list[Callable[[int, int], Division]]:
    """Every place of this release."""
    places: list[Callable[[int, int], Division]]
    places = [_make_dummy, _dummy_run, _prepare_inputs_to_capture]
    if has_module("vllm.v1.worker.gpu.lora_utils") and hasattr(
        importlib.import_module("vllm.v1.worker.gpu.lora_utils"), "create_lora_capture_hook"
    ):
        places.append(_lora_hook)
    return places


# --- the places -------------------------------------------------------------------------------


def _make_dummy(num_tokens: int, max_num_reqs: int) -> Division:
    buffers = _input_buffers(num_tokens, max_num_reqs)
    num_reqs = min(num_tokens, max_num_reqs)
    batch = call(
        _input_batch_type().make_dummy,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        input_buffers=buffers,
        device=DEVICE,
    )
    found = Division("InputBatch.make_dummy", num_tokens, _lengths_of(batch))
    found.wrong += [*_wrong_fields(batch, num_reqs, num_tokens, buffers)]
    found.wrong += [*_wrong_buffers(buffers, num_reqs, num_tokens)]
    return found


def _prepare_inputs_to_capture(num_tokens: int, max_num_reqs: int) -> Division:
    buffers = _input_buffers(num_tokens, max_num_reqs)
    num_reqs = min(num_tokens, max_num_reqs)
    given: list[Any] = []

    class Builder:  # up to 0.16.0
        def build(self, common_prefix_len: int, common_attn_metadata: Any) -> None:
            given.append(common_attn_metadata)

    class ModelState:  # since 0.17.0
        def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
            given.append(input_batch)

    tables = [torch.zeros(max_num_reqs, 1, dtype=torch.int32)]
    slots = torch.full((1, num_tokens), -1, dtype=torch.int64)
    call(
        importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils").prepare_inputs_to_capture,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        model_state=ModelState(),
        input_buffers=buffers,
        block_tables=SimpleNamespace(
            input_block_tables=tables,
            slot_mappings=slots,
            get_dummy_block_tables=lambda num_reqs: [table[:num_reqs] for table in tables],
            get_dummy_slot_mappings=lambda num_tokens: slots[:, :num_tokens],
            cp_size=1,
            cp_rank=0,
            cp_interleave=1,
        ),
        attn_metadata_builders=[Builder()],
        attn_groups=[],
        max_model_len=MAX_MODEL_LEN,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])]),
        full_cudagraph=True,
    )
    (batch,) = given
    found = Division("prepare_inputs_to_capture", num_tokens, _lengths_of(batch))
    found.wrong += [*_wrong_buffers(buffers, num_reqs, num_tokens)]
    return found


class _StepStarted(Exception):
    """The lengths are known: ``_dummy_run`` has done its part."""


def _dummy_run(num_tokens: int, max_num_reqs: int, **arguments: Any) -> Division:
    lengths: dict[str, list[int]] = {}

    class Runner(importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
            scheduled = scheduler_output.num_scheduled_tokens
            names = [f"_dummy_req_{i}" for i in range(len(scheduled))]
            lengths["SchedulerOutput.num_scheduled_tokens"] = [scheduled[name] for name in names]
            assert scheduler_output.total_num_scheduled_tokens == num_tokens
            raise _StepStarted

        def maybe_dummy_run_with_lora(
            self, _: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any, **kwargs: Any
        ) -> contextlib.AbstractContextManager[None]:
            lengths["num_scheduled_tokens of LoRA"] = num_scheduled_tokens.tolist()
            if num_sampled_tokens is not None:  # up to 0.14.1 the forward pass comes next
                raise _StepStarted
            return contextlib.nullcontext()

    runner: Any = Runner()
    vars(runner).update(
        max_num_reqs=max_num_reqs,
        max_num_tokens=num_tokens,
        decode_query_len=UNIFORM_QUERY_LEN,
        cudagraph_manager=SimpleNamespace(uniform_decode_query_len=UNIFORM_QUERY_LEN),  # 0.17
        input_buffers=_input_buffers(num_tokens, max_num_reqs),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        device=DEVICE,
        dp_size=1,  # 0.12 and 0.13
        uses_mrope=False,  # 0.14
        parallel_config=SimpleNamespace(data_parallel_size=1),  # 0.14
        is_first_pp_rank=True,
        is_encoder_only=False,  # 0.28
        lora_config=None,
        speculator=None,
    )
    with contextlib.suppress(_StepStarted):
        runner._dummy_run(num_tokens, **arguments)
    place = "GPUModelRunner._dummy_run" + " (uniform decode)" * ("uniform_decode" in arguments)
    return Division(place, num_tokens, lengths)


def _lora_hook(num_tokens: int, max_num_reqs: int) -> Division:
    lengths: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def maybe_select_dummy_loras(_: Any, num_scheduled_tokens: Any, **kwargs: Any) -> Any:
        lengths["num_scheduled_tokens of LoRA"] = num_scheduled_tokens.tolist()
        yield

    hook = importlib.import_module("vllm.v1.worker.gpu.lora_utils").create_lora_capture_hook(
        object(), SimpleNamespace(maybe_select_dummy_loras=maybe_select_dummy_loras)
    )
    hook(1, min(num_tokens, max_num_reqs), num_tokens)
    return Division("the LoRA hook of the capture", num_tokens, lengths)


# --- batches ----------------------------------------------------------------------------------


def _input_batch_type() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBatch


def _input_buffers(num_tokens: int, max_num_reqs: int) -> Any:
    """Buffers for more than the batch, with what earlier batches have left in them."""
    buffers = call(
        importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBuffers,
        max_num_reqs=max_num_reqs + MORE_REQS,
        max_num_tokens=num_tokens,
        inputs_embeds_size=cpu.LLAMA["hidden_size"],
        vocab_size=cpu.LLAMA["vocab_size"],
        dtype=torch.float32,
        device=DEVICE,
        pin_memory=False,
    )
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
        cpu.device_tensor(getattr(buffers, name)).fill_(STALE)
    return buffers


# Every array of a batch, or of the metadata made of it, that tells how long its requests are.
_LENGTHS = ("num_scheduled_tokens", "seq_lens", "seq_lens_np", "seq_lens_cpu_upper_bound")
_STARTS = ("query_start_loc", "query_start_loc_np", "query_start_loc_cpu")


def _lengths_of(batch: Any) -> dict[str, list[int]]:
    """The lengths that each array of a batch, or of attention metadata, tells."""
    arrays = {name: getattr(batch, name) for name in _LENGTHS if hasattr(batch, name)}
    starts = {name: np.asarray(getattr(batch, name)) for name in _STARTS if hasattr(batch, name)}
    arrays |= {f"{name}, differences": np.diff(found) for name, found in starts.items()}
    assert all(int(found[0]) == 0 for found in starts.values())
    return {name: np.asarray(found).tolist() for name, found in arrays.items()}


def _wrong_buffers(buffers: Any, num_reqs: int, num_tokens: int) -> Iterable[str]:
    """FULL graphs also read what is behind the requests of the batch."""
    if set(buffers.seq_lens[num_reqs:].tolist()) != {0}:
        yield "seq_lens past the requests"
    starts = cpu.device_tensor(buffers.query_start_loc)
    if set(starts[num_reqs:].tolist()) != {num_tokens}:
        yield "query_start_loc past the requests"


def _wrong_fields(batch: Any, num_reqs: int, num_tokens: int, buffers: Any) -> Iterable[str]:
    """The fields of a batch that are not what they are in every release."""
    requests, zeros = [*range(num_reqs)], [0] * num_reqs
    # 0.12 and 0.13 leave the ids and positions of earlier batches in their buffers.
    left = STALE if hasattr(batch, "seq_lens_np") else 0
    expected: dict[str, object] = {
        "num_reqs": num_reqs,
        "num_reqs_after_padding": num_reqs,
        "num_tokens": num_tokens,
        "num_tokens_after_padding": num_tokens,
        "num_draft_tokens": 0,
        "idx_mapping": requests,
        "idx_mapping_np": requests,
        "expanded_idx_mapping": requests,
        "expanded_local_pos": zeros,
        "input_ids": [left] * num_tokens,
        "positions": [left] * num_tokens,
        "is_padding": [True] * num_tokens,
        "logits_indices": [end - 1 for end in itertools.accumulate(batch.num_scheduled_tokens)],
        "cu_num_logits": [*requests, num_reqs],
        "cu_num_logits_np": [*requests, num_reqs],
        "num_computed_tokens_np": zeros,
        "prefill_len_np": zeros,
        "num_computed_prefill_tokens_np": zeros,
        "is_prefilling_np": [False] * num_reqs,
        "has_prefill": False,
        "has_structured_output_reqs": False,
        "decode_graph_eligible": True,
    }
    if hasattr(buffers, "mrope_positions"):  # 0.14
        expected["mrope_positions"] = [[0] * num_tokens] * 3
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name == "req_ids":
            if [name.rpartition("_")[0] for name in value] != [f"req_{i}" for i in requests]:
                yield "req_ids"
        elif field.name in (*_LENGTHS, *_STARTS):
            if value.dtype not in (np.int32, torch.int32):
                yield f"the type of {field.name}"
        else:
            is_array = isinstance(value, torch.Tensor | np.ndarray)
            # What is not listed is not known yet.
            if (value.tolist() if is_array else value) != expected.get(field.name):
                yield field.name
    # Graphs read the persistent buffers.
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens", "is_padding"):
        if hasattr(batch, name):
            buffer = cpu.device_tensor(getattr(buffers, name))
            if getattr(batch, name).data_ptr() != buffer.data_ptr():
                yield f"{name} outside of its buffer"


# --- the result -------------------------------------------------------------------------------


def _faults(divisions: Sequence[Division]) -> list[str]:
    """One sentence for each place where a request has more than an equal share."""
    long: dict[str, list[str]] = {}
    for found in divisions:
        if found.longest > found.allowed:
            name, lengths = max(found.lengths.items(), key=lambda item: max(item[1]))
            request = lengths.index(found.longest)
            long.setdefault(found.place, []).append(
                f"request {request} of {found.num_reqs} is {found.longest} tokens long in {name}"
                f" ({found.allowed} each are enough for {found.num_tokens})"
            )
    return [f"{place}: {', '.join(requests)}" for place, requests in long.items()]


def _requirements(divisions: Sequence[Division]) -> list[dict[str, Any]]:
    """What has to hold of every dummy batch."""
    return [
        _requirement("the lengths add up to the tokens of the batch", divisions, _other_total),
        _requirement("host and device are told the same lengths", divisions, _disagreement),
        _requirement(
            "the lengths are those of 0.27.0: the last requests have one token more",
            divisions,
            _uneven,
        ),
        _requirement(
            "all else of the batch and of the persistent buffers is as in stock vLLM",
            divisions,
            lambda found: found.wrong,
        ),
    ]


def _other_total(found: Division) -> list[str]:
    totals = {name: sum(lengths) for name, lengths in found.lengths.items()}
    return [f"{total} in {name}" for name, total in totals.items() if total != found.num_tokens]


def _disagreement(found: Division) -> list[str]:
    told = {_runs(lengths): name for name, lengths in found.lengths.items()}
    if len(told) == 1:
        return []
    return [f"{lengths} in {name}" for lengths, name in told.items()] or ["no lengths"]


def _uneven(found: Division) -> list[str]:
    return [
        f"{_runs(lengths)} in {name}"
        for name, lengths in found.lengths.items()
        if lengths != found.even
    ]


def _requirement(
    name: str, divisions: Sequence[Division], wrong_in: Callable[[Division], list[str]]
) -> dict[str, Any]:
    wrong = [f"{found}: {', '.join(wrong)}" for found in divisions if (wrong := wrong_in(found))]
    return requirement(name, wrong, f"{len(divisions)} times")


def _outcome(
    divisions: Sequence[Division], requirements: list[dict[str, Any]], explanation: str
) -> dict[str, Any]:
    observations = {
        "explanation": explanation,
        "divisions": [
            {
                "place": found.place,
                "num_tokens": found.num_tokens,
                "num_reqs": found.num_reqs,
                "lengths": {name: _runs(each) for name, each in found.lengths.items()},
            }
            for found in divisions
        ],
    }
    text = columns(_rows(divisions), requirements, explanation)
    return outcome(_faults(divisions), requirements, observations, text)


def _runs(lengths: Sequence[int]) -> str:
    """Such as ``"255 x 1, 1 x 241"``."""
    return ", ".join(f"{len([*run])} x {length}" for length, run in itertools.groupby(lengths))


def _rows(divisions: Sequence[Division]) -> list[list[str]]:
    """What each place divides how."""
    rows = [["place", "tokens", "requests", "their lengths"]]
    for found in divisions:
        told = {_runs(lengths): None for lengths in found.lengths.values()}
        rows.append([found.place, str(found.num_tokens), str(found.num_reqs), " or ".join(told)])
    return rows


if __name__ == "__main__":
    sys.exit(run(__doc__, reproduce))
