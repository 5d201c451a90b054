"""The environment variables of the plugin.

``VLLM_CGFIX``
    unset, empty, ``0``, ``off``: nothing is changed. ``1``, ``on``, ``all``: every fix that
    this release needs. Or a comma list of fix ids; ``-id`` leaves one out
    (``all,-skip-attention``).
``VLLM_CGFIX_STRICT``
    ``1``: a requested fix that is refused stops the start instead of logging a WARNING.
``VLLM_CGFIX_UNVERIFIED``
    ``1``: where a source file is not one that the fix was proved on, let its structure decide.

This module is imported in every process that has one of the variables, switched off or not,
and so imports nothing itself.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FIXES = "VLLM_CGFIX"
STRICT = "VLLM_CGFIX_STRICT"
UNVERIFIED = "VLLM_CGFIX_UNVERIFIED"
VARIABLES = (FIXES, STRICT, UNVERIFIED)

_OFF = ("", "0", "off")
_ON = ("1", "on")
_ALL = ("1", "on", "all")


class SettingsError(ValueError):
    """A ``VLLM_CGFIX*`` variable holds something that is not valid: the message lists what is."""


class Settings:
    """What the environment asks for.

    Attributes:
        words: the words of ``VLLM_CGFIX``, lower case; empty when the plugin is off.
        strict: whether a refused fix stops the start.
        unverified: whether structure decides where a source is unknown.
    """

    __slots__ = ("strict", "unverified", "words")

    def __init__(self, words: tuple[str, ...], strict: bool = False, unverified: bool = False):
        self.words = words
        self.strict = strict
        self.unverified = unverified

    def chosen(self, ids: Iterable[str]) -> frozenset[str]:
        """The fix ids asked for, out of all that exist.

        Raises:
            SettingsError: a word is neither an id nor one of the general words.
        """
        ids = tuple(ids)
        chosen: set[str] = set()
        left_out: set[str] = set()
        for word in self.words:
            name = word.removeprefix("-")
            if word in _ALL:
                chosen.update(ids)
            elif name not in ids:
                raise _invalid(FIXES, word, _fix_words(ids))
            elif word == name:
                chosen.add(name)
            else:
                left_out.add(name)
        if left_out and not chosen:
            raise SettingsError(
                f"{FIXES}={','.join(self.words)} only leaves fixes out: "
                f"write {FIXES}=all,{','.join(self.words)} to have all the others"
            )
        return frozenset(chosen - left_out)


def read(environ: Mapping[str, str]) -> Settings:
    """Read the variables; ids are checked later, by :meth:`Settings.chosen`.

    Raises:
        SettingsError: a switch is neither on nor off, ``off`` stands among other words, or a
            variable's name starts with ``VLLM_CGFIX`` and is none of the three.
    """
    for name in environ:
        if name.startswith(FIXES) and name not in VARIABLES:
            raise SettingsError(f"unknown variable {name}: valid are {', '.join(VARIABLES)}")
    words = tuple(word.strip().lower() for word in environ.get(FIXES, "").split(","))
    if len(words) == 1 and words[0] in _OFF:
        words = ()
    for word in words:
        if word in _OFF:
            raise SettingsError(
                f"{FIXES}={environ[FIXES]}: '{word}' cannot stand in a list; "
                f"valid are {_fix_words(('ID',))}"
            )
    return Settings(words, _switch(environ, STRICT), _switch(environ, UNVERIFIED))


def _switch(environ: Mapping[str, str], name: str) -> bool:
    word = environ.get(name, "").strip().lower()
    if word not in _OFF + _ON:
        raise _invalid(name, word, "1, on, 0, off")
    return word in _ON


def _invalid(name: str, word: str, valid: str) -> SettingsError:
    return SettingsError(f"{name}: '{word}' is not valid; valid are {valid}")


def _fix_words(ids: Iterable[str]) -> str:
    return f"0, off, 1, on, all, {', '.join(ids)} (or a comma list; -ID leaves one out of all)"


def register_with_vllm() -> None:
    """Make the variables known to vLLM, where its table of variables is loaded.

    vLLM warns of, or stops on, ``VLLM_`` names that it does not know; Ray workers of 0.11.x are
    sent the names in the table; from 0.12.0 the table is also the key of the torch.compile
    cache, so that ``VLLM_CGFIX`` answers with the fixes decided: equal sets share a cache.
    """
    envs = sys.modules.get("vllm.envs")
    table = getattr(envs, "environment_variables", None)
    if isinstance(table, dict):
        table.setdefault(FIXES, _decided)
        table.setdefault(STRICT, _constant)
        table.setdefault(UNVERIFIED, _constant)


def _decided() -> str:
    plugin = sys.modules.get(f"{__package__}.plugin")
    return "" if plugin is None else ",".join(plugin.decided())


def _constant() -> str:
    """Neither switch changes what a fix compiles to."""
    return ""
