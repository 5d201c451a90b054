"""``dummy-lengths``: the requests of a dummy batch are as long as each other (PR 49751).

The V2 runner makes a dummy batch of so many tokens by dividing them among its requests. Up to
0.26.0 every request has the quotient, and the last one the whole remainder as well: 496 tokens for
256 requests are 255 requests of one token and one of 241. That one can be longer than
``max_model_len``, and attention then walks past the end of its row in the block table.

As in 0.27.0 the remainder is shared out: the *last* ``num_tokens % num_reqs`` requests have one
token more than the others, so that none has more than ``ceil(num_tokens / num_reqs)``:

* ``InputBatch.make_dummy``: dummy steps, profiling and, from 0.17.0 on, the capture get their batch
  there. Query starts, logits indices and what else there is come from the same lengths;
* ``GPUModelRunner._dummy_run``, from 0.15.0 on, whose scheduler output has lengths of its own;
* the LoRA hook of the capture, from 0.24.0 on, which maps tokens to adapters by the same lengths;
* ``prepare_inputs_to_capture`` up to 0.16.0, where the capture has lengths of its own and claims
  for each request as many tokens as the whole batch has. 0.17.0 dropped them for those of
  ``make_dummy``, which makes sequences as long as their queries, as the V1 runner does.

A dummy request is still longer than ``max_model_len`` where even equal requests are: where
``max_num_seqs * max_model_len`` is below the number of tokens. So it is in 0.27.0.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Insert, OneOf, Replace
from ..fix import Fix

_INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
_MODEL_RUNNER = "vllm.v1.worker.gpu.model_runner"
_LORA_UTILS = "vllm.v1.worker.gpu.lora_utils"
_CUDAGRAPH_UTILS = "vllm.v1.worker.gpu.cudagraph_utils"

_REMAINDER = "num_tokens % num_reqs"
_FIRST_LONGER = f"num_reqs - {_REMAINDER}"


def _spread(lengths: str, last: str, longer: str, *, before: str, after: str = "") -> list[Replace]:
    """One token more for each of the last requests, instead of many more for the last one.

    Args:
        lengths: the array of lengths.
        last: how its last entry is named.
        longer: the entries to raise by one.
        before: the statements that come right before.
        after: the statements that come right after.
    """
    stock = f"{before}{lengths}[{last}] += {_REMAINDER}\n{after}"
    by_one = f"{before}{lengths}[{last}] += 1\n{after}"
    return [
        Replace(_REMAINDER, by="1", within=stock),
        Replace(f"{lengths}[{last}]", by=f"{lengths}[{longer}]", within=by_one),
    ]


def _host_lengths(name: str) -> list[Replace]:
    equal = f"{name} = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)\n"
    return _spread(name, "-1", f"{_FIRST_LONGER} :", before=equal)


def _device_lengths(before: str = "") -> list[Replace]:
    return _spread(
        "input_buffers.seq_lens",
        "num_reqs - 1",
        f"{_FIRST_LONGER} : num_reqs",
        before=f"{before}input_buffers.seq_lens[:num_reqs] = num_tokens // num_reqs\n",
        after="input_buffers.seq_lens[num_reqs:] = 0",
    )


def _make_dummy(*steps: Replace) -> tuple[EditFunction]:
    return (EditFunction("InputBatch.make_dummy", steps),)


_TOTAL = "assert int(num_scheduled_tokens.sum()) == num_tokens\n"


def _to_capture(equal_starts: str, starts: str, stop: str) -> tuple[EditFunction]:
    """Lengths that ``prepare_inputs_to_capture`` makes itself.

    Args:
        equal_starts: the query starts of equal requests.
        starts: their array.
        stop: the end of the entries of this batch in it.
    """
    return (
        EditFunction(
            "prepare_inputs_to_capture",
            (
                Insert(
                    f"{starts}[{_FIRST_LONGER} : {stop}] += np.arange({_REMAINDER} + 1)",
                    after=f"num_tokens_per_req = num_tokens // num_reqs\n{equal_starts}",
                ),
                Replace(
                    "num_tokens",
                    by="num_tokens_per_req",
                    within=(
                        "input_buffers.seq_lens[:num_reqs] = num_tokens\n"
                        "input_buffers.seq_lens[num_reqs:] = 0"
                    ),
                ),
                Insert(
                    f"input_buffers.seq_lens[{_FIRST_LONGER} : num_reqs] += 1",
                    after="input_buffers.seq_lens[:num_reqs] = num_tokens_per_req",
                ),
            ),
        ),
    )


_EQUAL_LIST = "num_tokens_per_request = [num_tokens // num_reqs] * num_reqs"

FIX = Fix(
    id="dummy-lengths",
    title="the tokens of a dummy batch are shared out evenly among its requests",
    symptom=(
        "`CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS` or illegal memory access in the capture of CUDA "
        "graphs or in warm-up: one dummy request is longer than `max_model_len`"
    ),
    error_patterns=(
        r"cudbg_exception_warp_illegal_address",
        r"capturing cuda graphs",
        r"illegal (memory access|address).*\b(captur\w+|warm-?up|dummy)\b",
        r"\b(captur\w+|warm-?up|dummy)\b.*illegal (memory access|address)",
    ),
    upstream=("PR 49751",),
    scope="V2 runner",
    releases=(
        *("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0"),
        *("0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2"),
        *("0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0"),
    ),
    only_in={
        _MODEL_RUNNER: (
            *("0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0"),
            *("0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0"),
            *("0.24.0", "0.25.0", "0.25.1", "0.26.0"),
        ),
        _LORA_UTILS: ("0.24.0", "0.25.0", "0.25.1", "0.26.0"),
        _CUDAGRAPH_UTILS: ("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0"),
    },
    edits={
        _INPUT_BATCH: (
            OneOf(
                (
                    # 0.12 and 0.13 have the lengths in two arrays of the host.
                    _make_dummy(
                        *_host_lengths("num_scheduled_tokens"),
                        *_host_lengths("seq_lens_np"),
                        *_device_lengths(),
                    ),
                    _make_dummy(
                        *_host_lengths("num_scheduled_tokens"),
                        *_device_lengths(before=_TOTAL),
                    ),
                ),
            ),
        ),
        _MODEL_RUNNER: (
            EditFunction(
                "GPUModelRunner._dummy_run",
                (
                    Replace(
                        _REMAINDER,
                        by=f"[num_tokens // num_reqs + 1] * ({_REMAINDER})",
                        within=f"{_EQUAL_LIST}\nnum_tokens_per_request[-1] += {_REMAINDER}",
                    ),
                    Replace(
                        "num_tokens_per_request[-1]",
                        by="num_tokens_per_request",
                        within=f"{_EQUAL_LIST}\nnum_tokens_per_request[-1] += ...",
                    ),
                    Replace(
                        "[num_tokens // num_reqs] * num_reqs",
                        by=f"[num_tokens // num_reqs] * ({_FIRST_LONGER})",
                        within=_EQUAL_LIST,
                    ),
                ),
            ),
        ),
        _LORA_UTILS: (
            EditFunction("create_lora_capture_hook", (*_host_lengths("num_scheduled"),)),
        ),
        _CUDAGRAPH_UTILS: (
            OneOf(
                (
                    _to_capture(  # 0.12 and 0.13
                        "query_start_loc = input_buffers.query_start_loc\n"
                        "query_start_loc.np[: num_reqs + 1] = "
                        "np.arange(num_reqs + 1) * num_tokens_per_req",
                        "query_start_loc.np",
                        "num_reqs + 1",
                    ),
                    _to_capture(
                        "query_start_loc_np = "
                        "np.arange(num_reqs + 1, dtype=np.int32) * num_tokens_per_req",
                        "query_start_loc_np",
                        "",
                    ),
                ),
            ),
        ),
    },
    # What is made of the lengths, and who makes a dummy batch elsewhere.
    witnesses=(
        "vllm/v1/worker/gpu/attn_utils.py",
        "vllm/v1/worker/gpu/spec_decode/dflash/cudagraph.py",
    ),
)
