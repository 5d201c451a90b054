"""Find and import every module of vLLM that binds one of its functions by name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# For compiled operators that a module looks up and does not call here.
_OPERATORS = torch.library.Library("_C", "FRAGMENT")


def import_all(function: str) -> tuple[dict[str, Callable[[str], Any]], dict[str, str]]:
    """Import every module that binds a function by name.

    Args:
        function: the name, such as "get_attention_context".

    Returns:
        Each binding, the defining module's first, by module; and the modules that do not import
        here (another platform's models), with the reason. The decorator of the attention
        operators binds it too, in a closure: its entry names the operator.
    """
    found: dict[str, Callable[[str], Any]] = {}
    failed: dict[str, str] = {}
    for name in modules_with(function):
        try:
            module = _import(name)
        except Exception as error:  # a model of another platform fails as it likes
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        found[name] = getattr(module, function)
        for operator in ("unified_attention_with_output", "unified_mla_attention_with_output"):
            decorated = vars(module).get(operator)
            while decorated is not None:
                closure = inspect.getclosurevars(decorated).nonlocals
                if function in closure:
                    found[f"{name}: decorator of {operator}"] = closure[function]
                decorated = getattr(decorated, "__wrapped__", None)
    return found, failed


def _import(name: str) -> Any:
    """Import a module that may look up compiled operators which only a GPU's library defines."""
    while True:
        try:
            return importlib.import_module(name)
        except AttributeError as error:
            missing = re.search(r"'_OpNamespace' '_C' object has no attribute '(\w+)'", str(error))
            if missing is None:
                raise
            _OPERATORS.define(f"{missing[1]}() -> ()")


def modules_with(function: str) -> list[str]:
    """vLLM's modules that define ``function`` at their top level, then those that import it."""
    defining, importing = [], []
    for path in sorted(package_folder().rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if function not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                defining.append(module_name(path))
            elif isinstance(node, ast.ImportFrom) and function in {a.name for a in node.names}:
                importing.append(module_name(path))
    return defining + importing


def has_module(name: str) -> bool:
    """Whether a module can be found, without importing more than its packages."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def package_folder() -> Path:
    return Path(importlib.import_module("vllm").__path__[0])


def module_name(path: Path) -> str:
    parts = path.relative_to(package_folder().parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")
