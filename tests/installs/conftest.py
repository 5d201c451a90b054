"""Stock wheels with our wheel beside them, each by pip, and a clone of one for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .environments import Environment, stock_wheel, with_plugin


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """An environment with a stock release and our wheel; to be left as it is."""
    return lambda release: with_plugin(
        f"vllm-{release}", lambda: stock_wheel(release), tmp_path_factory
    )


@pytest.fixture
def install(
    installed: Callable[[str], Environment], tmp_path: Path
) -> Callable[[str], Environment]:
    """The same for the test to change."""
    return lambda release: installed(release).clone(tmp_path / release)
