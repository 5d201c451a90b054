"""Decisions by hash, on small installations of the test's own."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from vllm_cgfix.code_edit import EditFunction
from vllm_cgfix.decision import Decider, ReleaseTable
from vllm_cgfix.fix import Fix, State
from vllm_cgfix.fixes import CATALOGUE
from vllm_cgfix.installation import Installation

EDITED, WITNESS = "vllm/worker/runner.py", "vllm/table.py"


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


TABLE = ReleaseTable(
    ("1.0", "2.0", "2.1", "3.0"),
    {
        EDITED: {"absent": ["1.0"], sha("run 2"): ["2.0", "2.1"], sha("run 3"): ["3.0"]},
        WITNESS: {sha("table"): ["1.0", "2.0", "2.1"], sha("table 3"): ["3.0"]},
    },
)
FIX = Fix(
    id="sample",
    title="",
    symptom="",
    error_patterns=(),
    upstream=(),
    scope="V1 runner",
    releases=("2.0", "2.1"),
    edits={"vllm.worker.runner": (EditFunction("run", ()),)},
    witnesses=(WITNESS,),
)


@pytest.fixture
def decide(tmp_path):
    def decide(files, **options):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Decider(Installation(str(tmp_path / "vllm")), TABLE).decide(FIX, **options)

    return decide


def test_needed(decide):
    status = decide({EDITED: "run 2", WITNESS: "table"})
    assert (status.state, status.release) == (State.PENDING, "2.1")


@pytest.mark.parametrize("witness", ["table 3", "anything"])
def test_not_needed_whatever_the_witnesses(decide, witness):
    status = decide({EDITED: "run 3", WITNESS: witness})
    assert (status.state, status.release) == (State.NOT_NEEDED, "3.0")


def test_not_needed_where_the_file_is_absent(decide):
    assert decide({WITNESS: "table"}).state is State.NOT_NEEDED


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({EDITED: "run 2\r\n", WITNESS: "table"}, f"{EDITED} is that of no supported release"),
        ({EDITED: "run 2", WITNESS: "tablE"}, f"{WITNESS} is that of no supported release"),
        ({EDITED: "run 2"}, f"{WITNESS} is missing"),
        ({EDITED: "run 2", WITNESS: "table 3"}, f"{WITNESS} is that of 3.0, but other files"),
    ],
)
def test_unknown_source_names_the_file_and_the_ways_on(decide, files, reason):
    status = decide(files)
    assert status.state is State.REFUSED
    assert reason in status.reason
    assert "VLLM_CGFIX_UNVERIFIED=1" in status.remedy
    pending = decide(files, unverified=True)
    assert pending.state is State.PENDING
    assert reason in pending.notes[0]


OTHER = "vllm/worker/loras.py"
IN_ONE_RELEASE = dataclasses.replace(
    FIX,
    edits=FIX.edits | {"vllm.worker.loras": (EditFunction("map", ()),)},
    only_in={"vllm.worker.loras": ("2.1",)},
)
IN_ONE_TABLE = ReleaseTable(
    TABLE.releases,
    {
        EDITED: {"absent": ["1.0"], sha("run 2"): ["2.0", "2.1"], sha("run 3"): ["3.0"]},
        WITNESS: TABLE.files[WITNESS],
        OTHER: {"absent": ["1.0", "2.0"], sha("lora"): ["2.1", "3.0"]},
    },
)


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        ({EDITED: "run 2"}, ["runner"]),
        ({EDITED: "run 2", OTHER: "lora"}, ["runner", "loras"]),
        # By the structure: what the known files belong to tells the modules.
        ({EDITED: "run 2!"}, ["runner"]),
        ({EDITED: "run 2!", OTHER: "lora"}, ["runner", "loras"]),
        ({EDITED: "run 2!", OTHER: "lora!"}, ["runner", "loras"]),
    ],
)
def test_a_module_that_only_some_releases_have_edited(tmp_path, files, modules):
    for path, text in {**files, WITNESS: "table"}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    decider = Decider(Installation(str(tmp_path / "vllm")), IN_ONE_TABLE)
    status = decider.decide(IN_ONE_RELEASE, unverified=True)
    assert status.state is State.PENDING
    assert [*status.fix.edits] == [f"vllm.worker.{module}" for module in modules]


def test_a_file_that_cannot_be_read(decide, tmp_path):
    (tmp_path / EDITED).mkdir(parents=True)  # even root cannot read a folder
    status = decide({WITNESS: "table"})
    assert status.state is State.REFUSED
    assert "cannot be read" in status.reason


def test_the_table_in_the_package_is_whole():
    table = ReleaseTable.load()
    for fix in CATALOGUE:
        assert set(fix.releases) <= set(table.releases)
        for path in (*fix.edited_files, *fix.witnesses):
            listed = [release for found in table.files[path].values() for release in found]
            assert sorted(listed) == sorted(table.releases), path
        # What all edited files are together must tell whether a release needs the fix.
        needed_by_content: dict[tuple[str, ...], bool] = {}
        for release in table.releases:
            content = tuple(
                sha256
                for path in fix.edited_files
                for sha256, releases in table.files[path].items()
                if release in releases
            )
            needed = needed_by_content.setdefault(content, release in fix.releases)
            assert needed is (release in fix.releases), (
                f"{release} has the files of another release, but not its need of {fix.id}"
            )
