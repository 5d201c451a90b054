"""vLLM's own tests, taken out of the source distributions of its releases and kept in the cache."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from .sources import cache, fetched_once


def upstream_tests(release: str) -> Path:
    """The folder that holds ``tests/`` of a release's source distribution; fetched if missing.

    Raises:
        subprocess.CalledProcessError: it cannot be downloaded; the message was printed.
    """

    def fetch(temporary: Path, part: Path) -> None:
        with tarfile.open(download_sdist(release, temporary)) as archive:
            kept = []
            for member in archive:
                member.name = member.name.partition("/")[2]  # without vllm-VERSION/
                if member.name.startswith("tests/"):
                    kept.append(member)
            archive.extractall(part, kept, filter="data")

    what = f"the source distribution of vLLM {release}"
    return fetched_once(cache() / "sdist" / release, what, fetch)


def download_sdist(release: str, to: Path) -> Path:
    """Download the source distribution of a release and return it.

    Not with ``pip download``, which runs the ``setup.py`` of what it downloads: vLLM's looks for
    compilers. unearth finds and downloads as pip does, and stops there.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "unearth", f"vllm=={release}", "--no-binary"),
            *("--download", str(to), *_index_options()),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Path(json.loads(done.stdout)["local_path"])


def _index_options() -> list[str]:
    """The index that pip is configured to use, if it is another than the default."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings = dict(line.split("=", 1) for line in listed.splitlines())
    # pip's own order: the environment, then what is said for the command, then for all.
    for section in (":env:", "download", "global"):
        if index := settings.get(f"{section}.index-url"):
            return ["--index-url", ast.literal_eval(index)]
    return []
