"""The arithmetic of the table, on numbers of its own."""

from __future__ import annotations

from . import __main__ as bench


def test_medians_spread_and_ratio() -> None:
    pairs = [
        {"stock": {"x, s": 2.0}, "plugin": {"x, s": 1.0}},
        {"stock": {"x, s": 4.0}, "plugin": {"x, s": 3.0}},
        {"stock": {"x, s": 3.0}, "plugin": {"x, s": 1.5}},
    ]
    assert bench.rows(16, pairs) == [["16", "x, s", "3 (2-4)", "1.5 (1-3)", "0.500"]]


def test_a_side_that_failed_is_shown_as_missing() -> None:
    assert bench.rows(16, [{"stock": {"x, s": 2.0}, "plugin": {}}]) == [
        ["16", "x, s", "2 (2-2)", "none", "none"]
    ]


def test_what_only_one_release_measures_is_left_out() -> None:
    assert bench.rows(16, [{"stock": {}, "plugin": {}}]) == []
    assert "16 layers: 1 pairs" in bench.show({16: [{"stock": {}, "plugin": {}}]})


def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench.machine, "gpu", lambda: None)
    assert bench.main([]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err
