"""Whether a fix is needed here, decided by the hashes of vLLM's source files.

``releases.json`` holds, for every supported release, the SHA-256 of each file that a fix edits
or relies on. The version number decides nothing: vendors
patch, nightlies carry release numbers, and two wheels of one version can differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources

from .fix import Fix, FixStatus, State
from .installation import Installation

ABSENT = "absent"
"""Stands in for a hash in ``releases.json`` where a release has no such file."""

_UNKNOWN = (
    "see `vllm-cgfix status`; upgrade vllm-cgfix, install an unmodified release, "
    "or set VLLM_CGFIX_UNVERIFIED=1 to let the structure of the source decide"
)


class ReleaseTable:
    """Which releases a file's content belongs to.

    Attributes:
        releases: every release that the table knows, oldest first.
        files: path to hash (or ``ABSENT``) to the releases that have it.
    """

    def __init__(self, releases: tuple[str, ...], files: Mapping[str, Mapping[str, list[str]]]):
        self.releases = releases
        self.files = files

    @classmethod
    def load(cls) -> ReleaseTable:
        """Read the table in the package.

        Raises:
            ValueError: it is damaged.
            OSError: it is not there.
        """
        text = resources.files(__package__).joinpath("releases.json").read_text("utf-8")
        try:
            table = json.loads(text)
            return cls(tuple(table["releases"]), dict(table["files"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a table of releases: {error!r}") from None

    def releases_with(self, path: str, sha256: str | None) -> frozenset[str]:
        """The releases in which the file at ``path`` has this hash (None: is not there)."""
        return frozenset(self.files.get(path, {}).get(sha256 or ABSENT, ()))

    def sort_key(self, release: str) -> int:
        """For sorting releases, oldest first."""
        return self.releases.index(release)


class Decider:
    """Decides fix by fix for one installation; each file is read once."""

    def __init__(self, installation: Installation, table: ReleaseTable):
        self.installation = installation
        self.table = table
        self._hashes: dict[str, str | None] = {}

    def sha256(self, path: str) -> str | None:
        """The hash of an installed file; None where there is none.

        Raises:
            OSError: it cannot be read.
        """
        if path not in self._hashes:
            self._hashes[path] = self.installation.sha256(path)
        return self._hashes[path]

    def decide(self, fix: Fix, *, unverified: bool = False) -> FixStatus:
        """The state of a fix that is asked for: not-needed, pending or refused.

        Args:
            fix: the fix.
            unverified: leave a fix pending whose sources are unknown, for its edits to find
                out whether the structure is the same.
        """
        try:
            edited = {path: self.sha256(path) for path in fix.edited_files}
            release, reason = self._identify(edited)
            if release is not None and release not in fix.releases:
                return FixStatus(fix, State.NOT_NEEDED, release=release)
            if release is not None:
                witnesses = {path: self.sha256(path) for path in fix.witnesses}
                found, reason = self._identify({**edited, **witnesses})
                if found is not None:
                    return FixStatus(fix.for_release(found), State.PENDING, release=found)
        except OSError as error:
            return FixStatus(
                fix,
                State.REFUSED,
                f"{error.filename} cannot be read: {error.strerror}",
                "make vLLM's source files readable to this user",
            )
        if not unverified:
            return FixStatus(fix, State.REFUSED, reason, _UNKNOWN)
        # Which modules are to be edited, the files that are known tell.
        known = {p: sha256 for p, sha256 in edited.items() if self.table.releases_with(p, sha256)}
        fix = fix.for_release(self._identify(known)[0] if known else None)
        missing = [path for path in fix.edited_files if edited[path] is None]
        if missing:
            reason = f"{missing[0]} does not exist here"
            return FixStatus(fix, State.REFUSED, reason, "install an unmodified release")
        return FixStatus(fix, State.PENDING, notes=[f"unverified: {reason}"])

    def _identify(self, hashes: Mapping[str, str | None]) -> tuple[str | None, str]:
        """The newest release that has all of these files, or None and why there is none."""
        common = frozenset(self.table.releases)
        for path, sha256 in hashes.items():
            releases = self.table.releases_with(path, sha256)
            if not releases and sha256 is None:
                return None, f"unknown source: {path} is missing"
            if not releases:
                return None, f"unknown source: {path} is that of no supported release"
            if not common & releases and sha256 is None:
                return None, (
                    f"unknown source: {path} is missing, "
                    f"but other files are that of {_span(self.table, common)}"
                )
            if not common & releases:
                return None, (
                    f"unknown source: {path} is that of {_span(self.table, releases)}, "
                    f"but other files are that of {_span(self.table, common)}"
                )
            common &= releases
        return max(common, key=self.table.sort_key), ""


def _span(table: ReleaseTable, releases: Iterable[str]) -> str:
    return ", ".join(sorted(releases, key=table.sort_key))
