"""Drive a V1 model runner by hand and record what it prepares for the model.

:class:`LiveRequest` takes a request through the real ``execute_model``; :class:`Probe` stands where
the model is and notes, at the moment the model runs, everything that a CUDA graph would read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from . import cpu
from .cpu import device_tensor

FIRST_BLOCK = 3  # block 0 is vLLM's null block: a live request never owns it


@dataclasses.dataclass
class Plan:
    """What the runner handed to one metadata builder (``CommonAttentionMetadata``).

    ``for_capture``: to its ``build_for_cudagraph_capture``, not to its ``build``.
    """

    kv_cache_group: int
    ubatch: int
    for_capture: bool
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: list[int]
    query_start_loc_cpu: list[int]
    seq_lens: list[int]
    slot_mapping: list[int]
    block_table: list[list[int]]


@dataclasses.dataclass
class ForwardPass:
    """What a forward pass of the model finds; the buffers whole, as a replayed graph sees them.

    ``metadata`` is None, or for each microbatch (one without DBO) a mapping from layer to the type
    of its metadata. ``slot_mapping`` and ``block_table`` have one entry a KV cache group;
    ``context_slot_mapping`` is what the forward context has for each layer (from 0.15).
    """

    mode: str
    descriptor: dict[str, Any] | None
    metadata: list[dict[str, str]] | None
    num_input_tokens: int
    input_ids: list[int]
    positions: list[int]
    query_start_loc: list[int]
    query_start_loc_cpu: list[int]
    seq_lens: list[int]
    slot_mapping: list[list[int]]
    context_slot_mapping: list[list[int]]
    block_table: list[list[list[int]]]
    plans: list[Plan]
    seq_lens_at_model_kwargs: list[int]
    collectives: int
    events: list[str]

    def inputs(self) -> dict[str, Any]:
        """What a real step prepares for its own requests and tokens."""
        tokens = self.num_input_tokens
        requests = self.plans[0].num_reqs
        return {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "query_start_loc": self.query_start_loc[: requests + 1],
            "seq_lens": self.seq_lens,
            "slot_mapping": [slots[:tokens] for slots in self.slot_mapping],
            "block_table": [rows[:requests] for rows in self.block_table],
        }


def as_dict(descriptor: Any) -> dict[str, Any]:
    """The fields of a ``BatchDescriptor``: a named tuple up to 0.16, then a dataclass."""
    fields = descriptor._asdict() if hasattr(descriptor, "_asdict") else vars(descriptor)
    return dict(fields)


class Probe:
    """Replaces a runner's model and listens to its builders, collectives and pinned buffers.

    ``passes`` collects every forward pass. Use :meth:`dummy_run` for one dummy batch.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.passes: list[ForwardPass] = []
        self._plans: list[Plan] = []
        self._seq_lens_at_model_kwargs: list[int] = []
        self._collectives = 0
        self._events: list[str] = []
        self._get_forward_context = importlib.import_module(
            "vllm.forward_context"
        ).get_forward_context
        runner.model = _Model(runner.model, self._forward)
        self._listen_to_builders()
        self._listen_to_model_kwargs()

    def dummy_run(self, num_tokens: int, **arguments: Any) -> ForwardPass:
        """Run the runner's real ``_dummy_run`` and return its forward pass."""
        self._reset()
        self.runner._dummy_run(num_tokens, **arguments)
        return self._finished()

    def step(self, scheduler_output: Any) -> ForwardPass:
        """Run the runner's real ``execute_model`` (and sampling) and return its forward pass."""
        self._reset()
        if self.runner.execute_model(scheduler_output) is None:
            self.runner.sample_tokens(None)  # its own call from 0.11.1 on
        return self._finished()

    def _reset(self) -> None:
        self._plans, self._seq_lens_at_model_kwargs = [], []
        self._collectives = 0

    def _finished(self) -> ForwardPass:
        # The runner may still use the collective and the event after the model has run.
        return dataclasses.replace(
            self.passes[-1], collectives=self._collectives, events=self._events
        )

    def _forward(self, input_ids: Any, positions: torch.Tensor) -> None:
        context = self._get_forward_context()
        metadata = context.attn_metadata
        if metadata is not None:
            ubatches = metadata if isinstance(metadata, list) else [metadata]
            metadata = [
                {layer: type(value).__name__ for layer, value in ubatch.items()}
                for ubatch in ubatches
            ]
        descriptor = context.batch_descriptor
        runner = self.runner
        tables = runner.input_batch.block_table.block_tables
        self.passes.append(
            ForwardPass(
                mode=context.cudagraph_runtime_mode.name,
                descriptor=None if descriptor is None else as_dict(descriptor),
                metadata=metadata,
                num_input_tokens=positions.shape[-1],
                input_ids=input_ids.tolist(),
                positions=positions.tolist(),
                query_start_loc=device_tensor(runner.query_start_loc).tolist(),
                query_start_loc_cpu=runner.query_start_loc.cpu.tolist(),
                seq_lens=device_tensor(runner.seq_lens).tolist(),
                slot_mapping=[device_tensor(table.slot_mapping).tolist() for table in tables],
                context_slot_mapping=_context_slot_mapping(context),
                block_table=[device_tensor(table.block_table).tolist() for table in tables],
                plans=self._plans,
                seq_lens_at_model_kwargs=self._seq_lens_at_model_kwargs,
                collectives=self._collectives,
                events=self._events,
            )
        )

    def _listen_to_builders(self) -> None:
        for kv_cache_group, attention_groups in enumerate(self.runner.attn_groups):
            for group in attention_groups:
                # 0.10.2 has no microbatches and one builder a group.
                builders = getattr(group, "metadata_builders", None) or [group.metadata_builder]
                for ubatch, builder in enumerate(builders):
                    for method in ("build", "build_for_cudagraph_capture"):
                        self._listen_to(builder, method, kv_cache_group, ubatch)

    def _listen_to(self, builder: Any, method: str, kv_cache_group: int, ubatch: int) -> None:
        original = getattr(builder, method)

        def listening(*args: Any, **kwargs: Any) -> Any:
            # build_for_cudagraph_capture calls build: only the outer call is the runner's.
            outermost = not builder.__dict__.get("_listening")
            if outermost:
                common = next(
                    value
                    for value in (*args, *kwargs.values())
                    if hasattr(value, "num_actual_tokens")
                )
                for_capture = method == "build_for_cudagraph_capture"
                self._plans.append(_plan(common, kv_cache_group, ubatch, for_capture))
            builder._listening = True
            try:
                return original(*args, **kwargs)
            finally:
                builder._listening = not outermost

        setattr(builder, method, listening)

    def _listen_to_model_kwargs(self) -> None:
        original = self.runner._init_model_kwargs

        def listening(*args: Any, **kwargs: Any) -> Any:
            self._seq_lens_at_model_kwargs = device_tensor(self.runner.seq_lens).tolist()
            return original(*args, **kwargs)

        self.runner._init_model_kwargs = listening

    @property
    def agrees_on_microbatches_first(self) -> bool:
        """Whether the ranks agree on microbatches by a collective of its own (up to 0.11.0)."""
        module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
        return not hasattr(module, "coordinate_batch_across_dp")

    @contextlib.contextmanager
    def busy_rank(self, num_tokens: int) -> Iterator[None]:
        """Let every collective meet a second data-parallel rank with ``num_tokens`` tokens.

        Only ``torch.distributed.all_reduce`` is replaced; what the runner makes of its result is
        vLLM's own code. The other rank agrees with this one in everything else.
        """
        runner = self.runner
        parallel, model = runner.parallel_config, runner.model_config
        base = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        real_all_reduce = torch.distributed.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._collectives += 1
            if tensor.dim() == 1:  # up to 0.11.0: the tokens of each rank
                tensor[1] = num_tokens
            else:  # since: rows of facts; the first two are tokens before and after padding
                tensor[:, 1] = tensor[:, 0]
                tensor[:2, 1] = num_tokens

        names = [n for n in ("data_parallel_size", "is_moe_model") if hasattr(parallel, n)]
        saved = {name: getattr(parallel, name) for name in names}
        saved_eager = model.enforce_eager
        parallel.data_parallel_size, model.enforce_eager = 2, False
        if "is_moe_model" in names:  # from 0.14 on only ranks with experts wait
            parallel.is_moe_model = True
        if hasattr(base, "get_dp_padding"):  # the CPU runner of 0.11.0 overrides it with "none"
            runner.get_dp_padding = types.MethodType(base.get_dp_padding, runner)
        torch.distributed.all_reduce = all_reduce
        try:
            yield
        finally:
            torch.distributed.all_reduce = real_all_reduce
            vars(runner).pop("get_dp_padding", None)
            model.enforce_eager = saved_eager
            for name, value in saved.items():
                setattr(parallel, name, value)

    @contextlib.contextmanager
    def input_preparation_event(self) -> Iterator[None]:
        """Give the runner an event, as async scheduling does, and log it with all writes.

        The log (``ForwardPass.events``) holds "synchronize", "record", "write NAME" for a write to
        the host side of ``seq_lens`` or ``query_start_loc`` and "copy NAME" for their transfer.
        """
        runner = self.runner

        def log(what: str) -> None:
            self._events.append(what)

        event = types.SimpleNamespace(
            synchronize=lambda: log("synchronize"), record=lambda: log("record")
        )
        self._events = []
        saved_event = runner.prepare_inputs_event
        runner.prepare_inputs_event = event
        undo: list[Callable[[], None]] = []
        for name in ("seq_lens", "query_start_loc"):
            buffer = getattr(runner, name)
            if not isinstance(buffer, torch.Tensor):  # a bare tensor is not pinned memory
                undo.append(_log_writes(buffer, name, log))
        try:
            yield
        finally:
            runner.prepare_inputs_event = saved_event
            for restore in undo:
                restore()


def _context_slot_mapping(context: Any) -> list[list[int]]:
    by_layer = getattr(context, "slot_mapping", None) or {}
    ubatches = by_layer if isinstance(by_layer, list) else [by_layer]
    return [slots.tolist() for ubatch in ubatches for slots in ubatch.values()]


class _Model(torch.nn.Module):  # torch is not typed here
    """Stands for the model: records, and computes nothing."""

    def __init__(self, model: torch.nn.Module, record: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self._real = [model]  # in a list: not a submodule
        self._record = record

    def forward(self, *, input_ids: Any, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        self._record(input_ids, positions)
        return torch.zeros(positions.shape[-1], cpu.LLAMA["hidden_size"])

    def compute_logits(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(len(hidden_states), cpu.LLAMA["vocab_size"])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._real[0], name)


class _LoggingArray(np.ndarray[Any, Any]):
    """A view of a numpy array that reports writes through it and through its own views."""

    report: Callable[[], None] | None = None

    def __array_finalize__(self, obj: Any) -> None:
        self.report = getattr(obj, "report", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.report is not None:
            self.report()
        super().__setitem__(key, value)

    def fill(self, value: Any) -> None:
        if self.report is not None:
            self.report()
        super().fill(value)


def _log_writes(buffer: Any, name: str, log: Callable[[str], None]) -> Callable[[], None]:
    saved = buffer.np
    view = saved.view(_LoggingArray)
    view.report = lambda: log(f"write {name}")
    original = buffer.copy_to_gpu

    def copy_to_gpu(*args: Any) -> Any:
        log(f"copy {name}")
        return original(*args)

    buffer.np, buffer.copy_to_gpu = view, copy_to_gpu

    def restore() -> None:
        buffer.np = saved
        del buffer.copy_to_gpu

    return restore


def _plan(common: Any, kv_cache_group: int, ubatch: int, for_capture: bool) -> Plan:
    return Plan(
        kv_cache_group=kv_cache_group,
        ubatch=ubatch,
        for_capture=for_capture,
        num_reqs=int(common.num_reqs),
        num_actual_tokens=int(common.num_actual_tokens),
        max_query_len=int(common.max_query_len),
        max_seq_len=int(common.max_seq_len),
        query_start_loc=common.query_start_loc.tolist(),
        query_start_loc_cpu=common.query_start_loc_cpu.tolist(),
        seq_lens=common.seq_lens.tolist(),
        slot_mapping=common.slot_mapping.tolist(),
        block_table=common.block_table_tensor.tolist(),
    )


class LiveRequest:
    """One request, scheduled by hand onto blocks that are all its own.

    Args:
        probe: the runner to drive.
        req_id: unique among the runner's requests.
        num_prompt_tokens: length of the prompt.
        place: a number that no other live request has, for its blocks.
    """

    def __init__(
        self, probe: Probe, req_id: str, num_prompt_tokens: int = 100, place: int = 0
    ) -> None:
        self._probe = probe
        self._output = importlib.import_module("vllm.v1.core.sched.output")
        self.req_id = req_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        config = probe.runner.vllm_config
        length = config.model_config.max_model_len // config.cache_config.block_size
        groups = len(probe.runner.kv_cache_config.kv_cache_groups)
        first = [FIRST_BLOCK + (place * groups + group) * length for group in range(groups)]
        self.block_ids = tuple(list(range(start, start + length)) for start in first)

    def prefill(self, beside: LiveRequest | None = None) -> ForwardPass:
        """The whole prompt in one step.

        Args:
            beside: a request that decodes in the same step; one that has no part in a step is
                taken out of the runner's batch.
        """
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        request = _construct(
            self._output.NewRequestData,
            req_id=self.req_id,
            prompt_token_ids=[1 + i % 200 for i in range(self.num_prompt_tokens)],
            sampling_params=sampling(temperature=0.0, max_tokens=64),
            block_ids=self.block_ids,
            num_computed_tokens=0,
        )
        decoding = {} if beside is None else {"scheduled_cached_reqs": beside._one_more_token()}
        tokens = {} if beside is None else {beside.req_id: 1}
        return self._step(self.num_prompt_tokens, tokens, scheduled_new_reqs=[request], **decoding)

    def decode(self, finished: LiveRequest | None = None) -> ForwardPass:
        """One more token.

        Args:
            finished: a request that leaves the runner's batch with this step.
        """
        gone = set() if finished is None else {finished.req_id}
        cached = self._one_more_token()
        return self._step(1, {}, scheduled_cached_reqs=cached, finished_req_ids=gone)

    def _one_more_token(self) -> Any:
        return _construct(
            self._output.CachedRequestData,
            req_ids=[self.req_id],
            resumed_from_preemption=[False],
            new_token_ids=[],
            new_block_ids=[None],
            num_computed_tokens=[self.num_computed_tokens],
            num_output_tokens=[self.num_computed_tokens - self.num_prompt_tokens + 1],
        )

    def finish(self) -> None:
        """Take the request out of the runner's batch."""
        self._probe.runner.execute_model(self._schedule(finished_req_ids={self.req_id}))

    def _step(self, num_tokens: int, others: dict[str, int], **scheduled: Any) -> ForwardPass:
        output = self._schedule(
            num_scheduled_tokens={**others, self.req_id: num_tokens},
            total_num_scheduled_tokens=num_tokens + sum(others.values()),
            **scheduled,
        )
        self.num_computed_tokens += num_tokens
        return self._probe.step(output)

    def _schedule(self, **scheduled: Any) -> Any:
        defaults = {
            "scheduled_cached_reqs": self._output.CachedRequestData.make_empty(),
            "num_common_prefix_blocks": [0] * len(self.block_ids),
            "total_num_scheduled_tokens": 0,
        }
        return _construct(self._output.SchedulerOutput, **(defaults | scheduled))


_EMPTY: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set}


def _construct(kind: type[Any], **values: Any) -> Any:
    """An instance of a dataclass whose fields differ between releases.

    A field without a default and without a value is empty: by its annotation, or None.
    """
    arguments = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif field.default is field.default_factory is dataclasses.MISSING:
            kind_of_empty = _EMPTY.get(str(field.type).split("[")[0])
            arguments[field.name] = None if kind_of_empty is None else kind_of_empty()
        # A value for a field that this release does not have is what another release calls it.
    return kind(**arguments)
