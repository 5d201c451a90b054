"""``dummy-lengths`` as changes of the text of the functions that divide tokens among requests."""

from __future__ import annotations

from tests.releases.text import InsertText, Operation, ReplaceLine

_FROM_0_20_TO_0_23 = ("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0")
_FROM_0_24 = ("0.24.0", "0.25.0", "0.25.1", "0.26.0")

_FIRST_LONGER = "num_reqs - num_tokens % num_reqs"
_DEVICE = f"input_buffers.seq_lens[{_FIRST_LONGER} : num_reqs] += 1"


def _make_dummy(host: int, device: int, other_host: int | None = None) -> tuple[Operation, ...]:
    """The lines that give the last request the remainder, by where the lengths are."""
    operations = [
        ReplaceLine(host, f"num_scheduled_tokens[{_FIRST_LONGER} :] += 1"),
        ReplaceLine(device, _DEVICE),
    ]
    if other_host is not None:
        operations.append(ReplaceLine(other_host, f"seq_lens_np[{_FIRST_LONGER} :] += 1"))
    return tuple(operations)


def _dummy_run(equal: int) -> tuple[Operation, ...]:
    """The line that makes the requests equal; the remainder is in the one after it."""
    name, share = "num_tokens_per_request", "num_tokens // num_reqs"
    return (
        ReplaceLine(equal, f"{name} = [{share}] * ({_FIRST_LONGER})"),
        ReplaceLine(equal + 1, f"{name} += [{share} + 1] * (num_tokens % num_reqs)"),
    )


def _to_capture(starts: int, device: int, longer: str) -> tuple[Operation, ...]:
    """The lines that set the query starts and the lengths; the starts of the longer requests."""
    return (
        InsertText(f"{longer} += np.arange(num_tokens % num_reqs + 1)", after=starts),
        ReplaceLine(device, "input_buffers.seq_lens[:num_reqs] = num_tokens_per_req"),
        InsertText(_DEVICE, after=device),
    )


PATCHES = {
    "InputBatch.make_dummy": {
        ("0.12.0", "0.13.0"): _make_dummy(13, 27, other_host=25),
        ("0.14.0", "0.14.1"): _make_dummy(14, 19),
        ("0.15.0", "0.15.1"): _make_dummy(14, 19),
        ("0.16.0",): _make_dummy(15, 20),
        ("0.17.0", "0.17.1"): _make_dummy(17, 22),
        ("0.18.0", "0.18.1", "0.19.0", "0.19.1"): _make_dummy(17, 22),
        ("0.20.0", "0.20.1", "0.20.2"): _make_dummy(17, 22),
        ("0.21.0", "0.22.0", "0.22.1"): _make_dummy(17, 22),
        ("0.23.0", "0.24.0"): _make_dummy(17, 22),
        ("0.25.0", "0.25.1", "0.26.0"): _make_dummy(17, 22),
    },
    "GPUModelRunner._dummy_run": {
        ("0.15.0", "0.15.1"): _dummy_run(10),
        ("0.16.0",): _dummy_run(6),
        ("0.17.0", "0.17.1"): _dummy_run(19),
        ("0.18.0", "0.18.1"): _dummy_run(19),
        ("0.19.0", "0.19.1"): _dummy_run(21),
        _FROM_0_20_TO_0_23: _dummy_run(26),
        _FROM_0_24: _dummy_run(26),
    },
    "create_lora_capture_hook": {
        _FROM_0_24: (ReplaceLine(11, f"num_scheduled[{_FIRST_LONGER} :] += 1"),),
    },
    "prepare_inputs_to_capture": {
        ("0.12.0", "0.13.0"): _to_capture(
            12, 20, f"query_start_loc.np[{_FIRST_LONGER} : num_reqs + 1]"
        ),
        ("0.14.0", "0.14.1"): _to_capture(12, 21, f"query_start_loc_np[{_FIRST_LONGER} :]"),
        ("0.15.0", "0.15.1", "0.16.0"): _to_capture(
            12, 21, f"query_start_loc_np[{_FIRST_LONGER} :]"
        ),
    },
}
