"""What a state says of the model runner that the process has chosen."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_cgfix import plugin, process_facts
from vllm_cgfix.fix import FixStatus, State
from vllm_cgfix.fixes import CATALOGUE


@pytest.mark.parametrize(
    ("scope", "runner", "told"),
    [
        ("V1 runner", "V1 runner", False),
        ("V1 runner", "V2 runner", True),
        ("V2 runner", "V1 runner", True),
        ("V1 runner", None, False),
        ("V1 runner and V2 runner", "V1 runner", False),
        ("V1 runner and V2 runner", "V2 runner", False),
        ("engine core", "V1 runner", False),
        ("engine core", "V2 runner", False),
    ],
)
@pytest.mark.parametrize("state", [State.PENDING, State.NOT_NEEDED, State.REFUSED])
def test_the_runner_is_told_where_it_is_not_the_one_of_the_fix(
    monkeypatch, scope, runner, told, state
):
    fix = dataclasses.replace(CATALOGUE[0], scope=scope)
    monkeypatch.setattr(plugin._process, "statuses", {fix.id: FixStatus(fix, state)})
    monkeypatch.setattr(process_facts, "_runner", runner)
    notes = [f"this process uses the {runner}"] if told and state is State.PENDING else []
    assert plugin._current(fix).notes == notes


@pytest.mark.parametrize("fix", CATALOGUE, ids=lambda fix: fix.id)
def test_a_scope_names_runners_as_the_process_does(fix):
    if "runner" in fix.scope:
        assert {*fix.scope.split(" and ")} <= {"V1 runner", "V2 runner"}
