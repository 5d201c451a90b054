"""The logic of the GPU tests that needs no GPU, so that device time is not spent on finding out."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from . import machine, plan
from .children import Child, Children, Result, environment, table
from .drivers import blocks, dispatch_order, engine, models, skip_attention

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
    assert plan.children("0.10.2").keys() == {"verify/dispatch-order", "verify/skip-attention"}


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
