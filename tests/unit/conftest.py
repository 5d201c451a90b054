"""Modules of the tests' own, for the edit engine to work on."""

from __future__ import annotations

import importlib.util
import sys

import pytest


@pytest.fixture
def load(tmp_path):
    """Write a source text to a file and import it as a module."""
    names = []

    def load(source, name="cgfix_sample"):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]
