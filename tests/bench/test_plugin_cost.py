"""The benchmark prints every figure. How large they are is for a reader to judge, not for CI."""

from __future__ import annotations

import re

import pytest

from tests.bench import plugin_cost
from tests.bench.plugin_cost import RELEASES, SERVING_FUNCTIONS, SERVING_RELEASES
from tests.needs import modules, needed


def test_every_figure_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["plugin_cost", "--repeat", "1"])
    assert plugin_cost.main() == 0
    printed = capsys.readouterr().out
    for setting in ("unset", "=0"):
        for what, figure in (
            ("register()", r"[\d.]+ ms +[\d.]+ ms"),
            ("modules added", r"\d+"),
            ("of them vLLM's or torch's", "0"),
        ):
            assert re.search(
                rf"off \(VLLM_CGFIX {setting}\): {re.escape(what)} +{figure} ", printed
            )
    for release in RELEASES:
        for what in ("decision", "of it import of wrapt", "of it imports of vllm_cgfix"):
            assert re.search(rf"on, {release}: {what} +[\d.]+ ms +[\d.]+ ms", printed)
        edited = modules(needed(release))
        assert edited
        for module in edited:
            name = re.escape(module.removeprefix("vllm."))
            row = rf"edit, {release}, [\d.]+ M objects: {name} +[\d.]+ ms +[\d.]+ ms"
            assert len(re.findall(row, printed)) == 2  # as it is, and with a large heap
    for release in SERVING_RELEASES:
        for function in SERVING_FUNCTIONS:
            for what in ("stock", "with skip-attention"):
                assert re.search(rf"serving, {release}: {function}, {what} +[\d.]+ ns", printed)
            assert re.search(rf"serving, {release}: {function}, ratio +[\d.]+ +1.00", printed)
