"""The command line, where no vLLM is needed to see what it says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from vllm_cgfix import cli
from vllm_cgfix.fixes import CATALOGUE, dispatch_order
from vllm_cgfix.installation import Installation


def run(*arguments, env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "vllm_cgfix.cli", *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
    )


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


def test_without_vllm(no_vllm, capsys):
    assert cli.main(["status"]) == 2
    assert "python -m pip install vllm-cgfix" in capsys.readouterr().out
    assert cli.main(["status", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["vllm"] is None
    assert cli.main(["verify"]) == 2


@pytest.mark.parametrize("name", ["file", "empty", "namespace"])
def test_something_else_that_is_called_vllm(name, tmp_path):
    """A checkout's folder, or a script, must not be taken for an installation."""
    if name == "file":
        (tmp_path / "vllm.py").write_text("")
    else:
        (tmp_path / "vllm").mkdir()
        if name == "namespace":
            (tmp_path / "vllm" / "notes.txt").write_text("")
    done = run("status", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr


def test_unknown_words():
    assert cli.main(["verify", "dispach-order"]) == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["stat"])
    assert stop.value.code == 2


def test_a_bad_setting_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_CGFIX", "dispach-order")
    assert cli.main(["status"]) == 1
    assert "dispatch-order" in capsys.readouterr().err


def test_error_text_is_matched_without_regard_to_case(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(Installation, "find", lambda: Installation(str(tmp_path / "vllm")))
    cli.main(["status", "--error", "worker died in EXECUTE_DUMMY_BATCH"])
    assert dispatch_order.FIX.symptom in capsys.readouterr().out
    cli.main(["status", "--error", "out of cheese"])
    assert "No fix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("releases", "expected"),
    [
        (("b",), "b"),
        (("a", "b"), "a-b"),
        (("a", "c"), "a, c"),
        (("a", "c", "d", "e"), "a, c-e"),
        ((), ""),
    ],
)
def test_spans_of_releases(releases, expected):
    class SomeFix:
        pass

    SomeFix.releases = releases
    assert cli.needed_on(SomeFix, ("a", "b", "c", "d", "e")) == expected


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        *[(fix.id, fix.symptom) for fix in CATALOGUE],
        ("dispatch-order", "overwritten KV cache after an idle step"),
        ("dispatch-order", "hangs on idle data-parallel ranks"),
        ("skip-attention", "crashes at Capturing CUDA graphs"),
        ("skip-attention", "CUDA error: an illegal memory access was encountered"),
        ("skip-attention", "Capturing CUDA graphs (PIECEWISE):   0%\nCUDA error: ..."),
    ],
)
def test_symptoms_are_recognised(fix, text):
    (found,) = [each for each in CATALOGUE if each.id == fix]
    assert cli._explains(found, text)


@pytest.mark.parametrize("text", ["restarting the slow server", "out of memory in _dummy_run"])
def test_other_troubles_are_not(text):
    assert not [fix.id for fix in CATALOGUE if cli._explains(fix, text)]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "needed; not switched on (VLLM_CGFIX=1)"),
        ({"VLLM_CGFIX": "1"}, "needed; applied, by VLLM_CGFIX=1"),
        ({"VLLM_CGFIX": "all,-sample"}, "needed, but left out by VLLM_CGFIX=all,-sample"),
        ({"VLLM_CGFIX": "1", "VLLM_PLUGINS": "other"}, "does not list cgfix"),
    ],
)
def test_status_says_what_the_setting_does(variables, expected, tmp_path, monkeypatch, capsys):
    class Always(cli.Decider):
        def decide(self, fix, *, unverified=False):
            return cli.FixStatus(fix, cli.State.PENDING)

    sample = dataclasses.replace(dispatch_order.FIX, id="sample")
    monkeypatch.setattr(cli, "CATALOGUE", (sample,))
    monkeypatch.setattr(cli, "_IDS", ("sample",))
    monkeypatch.setattr(cli, "Decider", Always)
    monkeypatch.setattr(Installation, "find", lambda: Installation(str(tmp_path)))
    for name in ("VLLM_CGFIX", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["status"]) == 0
    assert expected in capsys.readouterr().out


def test_list_names_every_fix(capsys):
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(fix.id in printed for fix in CATALOGUE)
