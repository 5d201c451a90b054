"""The logic of the GPU tests that needs no GPU, so that device time is not spent on finding out."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_cgfix.fixes import CATALOGUE

from . import machine, plan, test_two_gpus
from .children import Child, Children, Result, environment, run, table
from .drivers import blocks, dispatch_order, engine, models, skip_attention, two_ranks

BLOCKS = 11


def block(number: int, ref_cnt: int = 0, block_hash: str | None = None, is_null: bool = False):
    return SimpleNamespace(block_id=number, ref_cnt=ref_cnt, block_hash=block_hash, is_null=is_null)


@pytest.mark.parametrize("shape", [(2, BLOCKS, 4, 3, 8), (BLOCKS, 2, 4, 3, 8)])
def test_changed_blocks_in_either_layout(shape: tuple[int, ...]) -> None:
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)]
    caches[0].fill_(float("nan"))  # what differs from itself has not changed
    before = blocks.snapshot(caches)
    dimension = shape.index(BLOCKS)
    caches[1].select(dimension, 7)[0, 0, 0, 0] = 1
    caches[2].select(dimension, 7)[1, 0, 0, 0] = 1
    caches[2].select(dimension, 3)[0, 0, 0, 0] = -0.0  # equal to 0.0, but written
    assert blocks.changed(before, blocks.snapshot(caches), BLOCKS) == {3: [2], 7: [1, 2]}


def test_blocks_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="which of"):
        blocks.by_block(torch.zeros(BLOCKS, BLOCKS, 2), BLOCKS)


def test_holders_of_blocks() -> None:
    pool = [block(0, 1, is_null=True), block(1, 1, "h"), block(2, 0, "h"), block(3), block(4, 2)]
    held = blocks.holders(pool)
    assert held == {1: "request", 2: "prefix cache", 4: "request"}
    assert blocks.held_changes({0: [1], 2: [1, 3], 3: [0]}, held) == {
        "2": "prefix cache, layers 1,3"
    }


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ({"a": (0, 100)}, "fresh"),
        ({"a": (64, 36)}, "cached"),
        ({"a": (0, 60)}, "chunk"),
        ({"old": (60, 20)}, "chunk"),
        ({"old": (60, 40)}, "last chunk"),
        ({"old": (100, 1)}, "decode"),
        ({"old": (105, 1), "a": (0, 100)}, "decode+fresh"),
    ],
)
def test_classify(step: dict[str, tuple[int, int]], kind: str) -> None:
    lengths = {"a": 100, "old": 100}
    assert dispatch_order.classify(step, lengths, step.keys() - {"old"}) == kind


def test_scenarios_fit_the_engine() -> None:
    for before, prompts, _ in dispatch_order.scenarios().values():
        every = [*before.values(), *prompts.values()]
        assert all(0 < token < models.VOCABULARY for p in every for token in p)
        assert sum(map(len, every)) < dispatch_order.NUM_BLOCKS * 16
    firsts = [engine.prompt(seed, 1)[0] for seed in (100, 300, 350, 600, 601, 900)]
    assert len(set(firsts)) == len(firsts), "prompts that share a prefix would be served cached"


def test_every_release_has_a_plan() -> None:
    for release in plan.RELEASES:
        for child in plan.children(release).values():
            assert child.name.endswith("/stock") == (child.fix is None)
    assert plan.children("0.10.2").keys() == {f"verify/{fix.id}" for fix in CATALOGUE}


def test_the_drivers_take_the_arguments_of_the_plan(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for release in plan.RELEASES:
        for child in plan.children(release).values():
            if child.module != "tests.gpu.drivers.skip_attention":
                continue
            parser = argparse.ArgumentParser()
            skip_attention.add_arguments(parser)
            arguments = parser.parse_args(child.arguments)
            chosen = skip_attention.settings(arguments)
            assert "--profile-memory" in child.arguments or chosen["kv_cache_memory_bytes"]


def test_stock_children_know_nothing_of_the_plugin(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CGFIX", "all")
    stock = environment(Child("x/stock", "m"), tmp_path, 0)
    fixed = environment(Child("x/plugin", "m", fix="dispatch-order"), tmp_path, 1)
    assert "VLLM_CGFIX" not in stock
    assert stock["VLLM_PLUGINS"] == ""
    assert fixed["VLLM_CGFIX"] == "dispatch-order"
    assert "VLLM_PLUGINS" not in fixed
    assert stock["VLLM_PORT"] != fixed["VLLM_PORT"]


def test_a_tree_that_is_not_installed_brings_its_entry_point(monkeypatch) -> None:
    monkeypatch.setattr(machine, "plugin_is_installed", lambda: False)
    folder = machine.import_folder.__wrapped__(with_plugin=True)
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    (point,) = found.entry_points
    assert (point.group, point.name) == ("vllm.general_plugins", "cgfix")
    assert point.value == "vllm_cgfix:register"
    bare = machine.import_folder.__wrapped__(with_plugin=False)
    assert not (bare / "vllm_cgfix").exists()


def driver(folder: Path, body: str) -> Child:
    """A child that runs some lines in place of a driver."""
    module = folder / "some_driver.py"
    module.write_text(
        f"import json, sys\nreport = sys.argv[sys.argv.index('--report') + 1]\n{body}"
    )
    return Child("x/stock", "some_driver", timeout=20, environ={"PYTHONPATH": str(folder)})


def test_children_report_even_when_they_fail(tmp_path: Path) -> None:
    running = Children(tmp_path / "out", jobs=1)
    body = "json.dump({'error': 'E'}, open(report, 'w')); print('last words'); sys.exit(3)"
    running.start([driver(tmp_path, body)])
    result = running.result("x/stock")
    running.close()
    assert (result.status, result.exit_code, result.report) == ("failed", 3, {"error": "E"})
    assert result.tail.endswith("last words\n")
    version = machine.vllm_version() or "none"
    written = json.loads((tmp_path / f"out/results-{version}.json").read_text())
    assert written["children"]["x/stock"]["status"] == "failed"
    with tarfile.open(tmp_path / f"out/logs-{version}.tar.gz") as archive:
        assert archive.getnames() == ["x/stock.log"]


def test_children_are_ended_after_their_time(tmp_path: Path) -> None:
    body = "import time; json.dump({'phase': 'p'}, open(report, 'w'))\ntime.sleep(60)"
    child = driver(tmp_path, body)
    running = Children(tmp_path / "out", jobs=1)
    running.start([Child(child.name, child.module, timeout=2, environ=child.environ)])
    assert running.result("x/stock").status == "timeout"
    assert running.result("x/stock").report == {"phase": "p"}
    running.close()


def test_after_the_deadline_nothing_is_started(tmp_path: Path) -> None:
    running = Children(tmp_path / "out", jobs=1)
    running.deadline = -1
    running.start([driver(tmp_path, "raise SystemExit(0)")])
    assert running.result("x/stock").status == "not run"
    running.close()


def test_table_shows_the_error_where_there_is_no_summary() -> None:
    results = {"a": Result("a", "failed", 1, 2.0, {"error": "boom"}), "b": Result("b", "ok")}
    lines = table(results).splitlines()
    assert lines[1].split() == ["a", "failed", "2.0", "boom"]


def test_lora_and_models_are_written(tmp_path: Path) -> None:
    for name in models.MODELS:
        config = json.loads((Path(models.write_model(name, tmp_path)) / "config.json").read_text())
        assert config["architectures"]


def test_a_watchdog_ends_the_process_and_says_why(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from tests.gpu.drivers import engine\n"
        "report = engine.Report(pathlib.Path(sys.argv[1]))\n"
        "with engine.Watchdog(report, 0.2).over('dummy batches'):\n"
        "    time.sleep(30)\n"
    )
    path = tmp_path / "report.json"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=machine.ROOT, capture_output=True, timeout=25
    )
    assert ended.returncode == 3
    assert json.loads(path.read_text())["hang"].startswith("dummy batches: no end within")


# --- two ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (0, "needs two CUDA GPUs, here are none"),
        (1, "needs two CUDA GPUs, here is one"),
        (2, None),
        (8, None),
    ],
)
def test_why_there_are_too_few_gpus(monkeypatch, count: int, reason: str | None) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (("H", (9, 0)),) * count)
    assert machine.too_few_gpus(2) == reason


def test_ranks_have_work_in_the_same_waves() -> None:
    busy, idle = (two_ranks.work(rank) for rank in range(two_ranks.RANKS))
    assert tuple(busy) == tuple(idle) == two_ranks.PHASES
    for phase in two_ranks.PHASES:
        assert len(busy[phase]) == len(idle[phase]), "a rank without a request does not join"
    (long,), (short,) = busy[two_ranks.IDLE], idle[two_ranks.IDLE]
    assert long.max_tokens - short.max_tokens >= test_two_gpus.MANY
    for waves in (busy, idle):
        every = [p for wave in itertools.chain(*waves.values()) for p in wave.prompts]
        assert max(map(len, every)) <= two_ranks.TOKEN_BUDGET, "a prefill in one step"
        different = {tuple(prompt) for prompt in every}
        assert len({prompt[0] for prompt in different}) == len(different), "no prefix is shared"
        assert sum(map(len, different)) < two_ranks.NUM_BLOCKS * 16 / 2, "nothing is evicted"


def test_ranks_do_not_look_for_the_same_ports(tmp_path: Path) -> None:
    taken: list[int] = []
    for index in range(2):
        first = int(environment(Child("x/stock", "m"), tmp_path, index)["VLLM_PORT"])
        both = [two_ranks.rank_environment(rank, first) for rank in range(two_ranks.RANKS)]
        assert both[0]["VLLM_DP_MASTER_PORT"] == both[1]["VLLM_DP_MASTER_PORT"]
        taken += [int(variables["VLLM_PORT"]) for variables in both]
        taken.append(int(both[0]["VLLM_DP_MASTER_PORT"]))
    # vLLM tries one after the other from VLLM_PORT on, and keeps ten from the master's.
    assert all(b - a >= 10 for a, b in itertools.pairwise(taken)), taken


class EngineCore:
    """What an observer needs of an engine core and of its worker."""

    def __init__(self) -> None:
        self.scheduler = self.model_executor = None
        self.cache = torch.zeros(2, two_ranks.NUM_BLOCKS, 16, 2, 8)
        self.pool = SimpleNamespace(blocks=[block(0, 1, is_null=True), block(1), block(2, 0, "h")])
        self.module = SimpleNamespace(set_forward_context=lambda *args, **kwargs: None)
        self.written: list[int] = []
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(kv_caches=[self.cache]),
            execute_model=lambda output: None,
            execute_dummy_batch=self.dummy_batch,
        )

    def dummy_batch(self) -> None:
        self.module.set_forward_context(
            None, cudagraph_runtime_mode=SimpleNamespace(name="FULL"), num_tokens=8
        )
        for number in self.written:
            self.cache[1, number] += 1

    def step(self, tokens: int) -> None:
        self.worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))

    def call(self, function) -> object:
        return function()


def test_an_observer_sees_what_dummy_batches_write() -> None:
    core = EngineCore()
    observer = two_ranks.Observer(core.worker, core.pool, core.module)
    core.step(5)
    core.cache[0, 2] = 1  # a real step writes what it likes
    core.written = [1, 2]
    for _ in range(3):
        core.step(0)
        core.worker.execute_dummy_batch()
    assert observer.end() == {
        "real": 1,
        "dummy": 3,
        "stretches": 1,
        "held": 1,
        "changed_held": {"2": "prefix cache, layers 0"},
        "contexts": {"FULL 8 without": 3},
        "all_reduce": {},
        "steps_per_second": None,
    }


def test_an_observer_forgives_real_steps_and_forgets_phases() -> None:
    core = EngineCore()
    observer = two_ranks.Observer(core.worker, core.pool, core.module)
    for _ in range(two_ranks.WARM + 5):
        core.worker.execute_dummy_batch()
        core.step(1)
        core.cache += 1
    seen = observer.end()
    assert seen["dummy"] == seen["real"] == seen["stretches"] == two_ranks.WARM + 5
    assert seen["changed_held"] == {}
    assert seen["steps_per_second"] > 0
    observer.begin()
    assert (observer.end()["real"], observer.end()["dummy"]) == (0, 0)


def test_an_observer_tells_callers_apart() -> None:
    core = EngineCore()
    observer = two_ranks.Observer(core.worker, core.pool, core.module)
    module = SimpleNamespace(all_reduce=lambda tensor, group=None: (tensor, group))
    observer.count_calls(module, "all_reduce")
    other = {"module": module, "__name__": "other"}
    assert [eval("module.all_reduce(1, group=2)", other) for _ in range(3)] == [(1, 2)] * 3
    module.all_reduce(1)
    assert observer.end()["all_reduce"] == {"other": 3, __name__: 1}


def test_the_engine_core_is_found_where_it_calls() -> None:
    core = EngineCore()
    assert core.call(lambda: core.call(two_ranks.engine_core)) is core
    assert two_ranks.engine_core() is None


def test_reports_of_ranks_are_merged() -> None:
    well, stuck, broken = {"phase": "done"}, {"phase": "p", "hang": "p: no end"}, {"error": "E"}
    assert two_ranks.merge([well, well], [0, 0]) == {"ranks": [well, well], "codes": [0, 0]}
    assert two_ranks.merge([well, stuck], [None, 3])["hang"] == "rank 1: p: no end"
    broke = two_ranks.merge([broken, well], [1, None])
    assert "hang" not in broke
    assert broke["problem"] == "rank 0: E in phase None"
    assert two_ranks.merge([{}, {}], [-9, 0])["problem"].startswith("rank 0: exit code -9")


def test_a_rank_does_not_outlive_one_that_failed(monkeypatch) -> None:
    monkeypatch.setattr(two_ranks, "PATIENCE", 0.3)
    codes = ("import time; time.sleep(60)", "raise SystemExit(3)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    assert two_ranks.wait(processes) == [None, 3]
    assert processes[0].returncode == -9


def test_the_leader_says_what_became_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('no vLLM today')")
    path = f"{tmp_path}:{machine.import_folder(with_plugin=False)}"
    child = Child("dp/stock", two_ranks.__name__, environ={"PYTHONPATH": path})
    result = run(child, tmp_path / "run")
    assert (result.status, result.exit_code) == ("failed", 1)
    for rank in range(two_ranks.RANKS):
        assert f"rank {rank}: ImportError: no vLLM today in phase 'import'" in result.why()


def two_ranks_result(*again: int, repeated: int = 1, block: bool = False) -> Result:
    """A result in which the second prompt's tokens are these when it is served again."""
    first, second = [[[1]]] * 4, [[[2]], [[2 * repeated]], [[2]]]
    tokens = {two_ranks.ALONE: first[:3] + second, two_ranks.AGAIN: [first[3], [list(again)]]}
    held = {"7": "request"} if block else {}
    phases = {phase: {"changed_held": held} for phase in two_ranks.PHASES}
    return Result("x", "ok", report={"ranks": [{"tokens": tokens, "phases": phases}]})


def test_answers_of_ranks_are_compared() -> None:
    well = two_ranks_result(2)
    assert test_two_gpus.repeatable(well)
    assert set(test_two_gpus.unequal(well).values()) == {0}
    assert test_two_gpus.changed(well) == {}
    assert set(test_two_gpus.unequal(two_ranks_result(3)).values()) == {1}
    assert not test_two_gpus.repeatable(two_ranks_result(2, repeated=2))
    assert len(test_two_gpus.changed(two_ranks_result(2, block=True))) == len(two_ranks.PHASES)
