"""What the tests of the edit engine share."""

from __future__ import annotations

import ast
import hashlib
import textwrap

from vllm_cgfix.code_edit import EditFunction, SourceEditor


def editor_of(module):
    path = module.__spec__.origin
    with open(path, "rb") as file:
        return SourceEditor(module, path, hashlib.sha256(file.read()).hexdigest())


def edited_text(source, *steps):
    tree = ast.parse(textwrap.dedent(source))
    EditFunction("f", steps).apply(tree)
    return ast.unparse(tree)
