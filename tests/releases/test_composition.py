"""Fixes that edit the same functions compose: any subset, applied and undone in any order.

In a process that has imported the stock sources, a walk applies or undoes one fix at a time and
comes by every subset of the fixes that the release needs; a second walk comes by those of the
fixes that edit one function, in another order. What the functions run must depend on the subset
alone.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from tests.needs import needed
from vllm_cgfix.fix import Fix
from vllm_cgfix.fixes import CATALOGUE

from .scenarios import server_of_each
from .test_rows import import_vllm

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
RELEASES = ("0.11.2", "0.12.0", "0.16.0", "0.19.1", "0.20.2", "0.26.0", "0.33.0")


def import_all(fixes: list[Fix]) -> None:
    for module in {module for fix in fixes for module in fix.edits}:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)


def apply(setting: str) -> None:
    import vllm_cgfix

    os.environ["VLLM_CGFIX"] = setting
    vllm_cgfix.register()


def applied() -> set[str]:
    import vllm_cgfix

    return {status.fix.id for status in vllm_cgfix.status() if status.state.value == "applied"}


def running() -> dict[str, Any]:
    """What each function that some fix has edited runs, and each class has for fields."""
    from vllm_cgfix.plugin import _process

    found: dict[str, Any] = {}
    for name, editor in _process.editors.items():
        for qualname, target in editor._targets.items():
            function = getattr(target, "function", None)
            found[f"{name}:{qualname}"] = (
                [*target.owner.__dataclass_fields__]
                if function is None
                else (function.__code__, function.__defaults__)
            )
    return found


def walk(ids: list[str], seed: int) -> Iterator[tuple[str, frozenset[str]]]:
    """One fix at a time, and the subset that is applied after it: a Gray code."""
    order = random.Random(seed).sample(ids, len(ids))
    subset: frozenset[str] = frozenset()
    for number in range(1, 2 ** len(order)):
        changed = order[(number & -number).bit_length() - 1]
        subset ^= {changed}
        yield changed, subset
    # The last subset of the code is one fix.
    for left in [*subset]:
        subset -= {left}
        yield left, subset


def walk_over_subsets(ids: list[str]) -> dict[str, int]:
    """Walk twice; the counts of what was seen.

    Raises:
        AssertionError: a subset is not applied, or runs something else than before.
    """
    import vllm_cgfix

    fixes = [fix for fix in CATALOGUE if fix.id in ids]
    import_all(fixes)
    apply(",".join(ids))
    assert applied() == {*ids}
    everything = running()
    vllm_cgfix.undo()
    stock = running()
    assert stock.keys() == everything.keys()
    assert not any(stock[name] == everything[name] for name in stock)
    seen = {frozenset[str](): stock, frozenset(ids): everything}
    steps = 0
    shared = [fix.id for fix in fixes if V1_RUNNER in fix.edits]
    for seed, some in enumerate((ids, shared)):
        for changed, subset in walk(some, seed):
            if changed in subset:
                apply(changed)
            else:
                vllm_cgfix.undo(changed)
            assert applied() == subset
            steps += 1
            now = running()
            before = seen.setdefault(subset, now)
            for name in now:
                assert now[name] == before[name], f"{name} with {sorted(subset)}"
    different = {tuple(map(repr, map(_content, found.values()))) for found in seen.values()}
    return {"subsets": len(seen), "steps": steps, "different": len(different)}


def _content(found: Any) -> Any:
    code = found[0]
    return (code.co_code, code.co_consts, code.co_names) if isinstance(code, CodeType) else found


def leave_out_each(ids: list[str]) -> None:
    """``all`` is every fix that the release needs; each can be left out alone."""
    import vllm_cgfix

    import_all([fix for fix in CATALOGUE if fix.id in ids])
    apply("all")
    assert applied() == {*ids}
    for left_out in ids:
        vllm_cgfix.undo()
        apply(f"all,-{left_out}")
        assert applied() == {*ids} - {left_out}


def real_steps() -> dict[str, list[str]]:
    """What a prefill, a decode and a dummy batch of the V1 runner call of ours."""
    from vllm_cgfix.plugin import _process
    from vllm_cgfix.verify import cpu
    from vllm_cgfix.verify.idle_batches import Scenario, open_probe
    from vllm_cgfix.verify.v1_runner import LiveRequest

    with open_probe(Scenario("real steps")) as probe:
        edited = {
            target.function.__code__: f"{name}:{qualname}"
            for name, editor in _process.editors.items()
            for qualname, target in editor._targets.items()
            if hasattr(target, "function")
        }
        calls: list[str] = []

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event != "call":
                return
            if frame.f_code in edited:
                calls.append(edited[frame.f_code])
            elif f"{os.sep}vllm_cgfix{os.sep}fixes{os.sep}" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)

        def called(step: Any) -> list[str]:
            calls.clear()
            sys.setprofile(profile)
            try:
                step()
            finally:
                sys.setprofile(None)
            return sorted(set(calls))

        request = LiveRequest(probe, "live")
        return {
            "prefill": called(request.prefill),
            "decode": called(request.decode),
            "finish": called(request.finish),
            "dummy": called(
                lambda: probe.runner._dummy_run(
                    4, cudagraph_runtime_mode=cpu.cudagraph_mode("FULL"), uniform_decode=True
                )
            ),
        }


server = server_of_each(RELEASES, import_vllm)


def test_every_subset_in_two_orders(server, capsys):
    release, process = server
    ids = [fix.id for fix in needed(release)]
    counts = process.run(walk_over_subsets, ids).value
    assert counts["subsets"] == 2 ** len(ids)
    assert counts["different"] == 2 ** len(ids), "two subsets that make no difference"
    with capsys.disabled():
        print(f"\n{release}: {len(ids)} fixes, {counts}")


def test_each_is_left_out_alone(server):
    release, process = server
    process.run(leave_out_each, [fix.id for fix in needed(release)])


def test_real_steps_run_nothing_of_the_fixes_for_dummy_batches(server):
    _, process = server
    called = process.run(real_steps, VLLM_CGFIX="all").value
    dummy = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run"
    assert dummy in called.pop("dummy")
    # An attribute read in the place where upstream's skip has one.
    allowed = {
        f"vllm.forward_context:{name}" for name in ("create_forward_context", "set_forward_context")
    }
    allowed |= {"vllm.model_executor.layers.attention.attention:get_attention_context"}
    for step, functions in called.items():
        assert {*functions} <= allowed, step


def test_the_walk_comes_by_every_subset() -> None:
    ids = ["a", "b", "c"]
    seen = [subset for _, subset in walk(ids, 0)]
    subsets = [frozenset(s) for n in range(len(ids) + 1) for s in itertools.combinations(ids, n)]
    assert {*seen} == {*subsets}
    assert all(len(a ^ b) == 1 for a, b in itertools.pairwise([frozenset[str](), *seen]))
