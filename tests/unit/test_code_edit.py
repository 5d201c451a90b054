"""The edit engine, on small modules of the test's own."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import traceback

import pytest

from vllm_cgfix.code_edit import (
    EditFunction,
    EditRefused,
    Insert,
    Move,
    Rename,
    SourceEditor,
    Wrap,
    matches,
    raise_when_called,
)

from .samples import edited_text, editor_of

SOURCE = '''
from __future__ import annotations
import contextlib

LOG = []

@contextlib.contextmanager
def scope():
    LOG.append("in")
    try:
        yield
    finally:
        LOG.append("out")

class Base:
    def run(self, n):
        return ["base", n]

class Runner(Base):
    @staticmethod
    def helper(n: Undefined = 1):
        return n + 1

    def run(self, n: int = 2, *, loud: bool = False) -> list:
        """Docstring."""
        size = n
        result = super().run(size)
        if loud:
            mode = self.__ask(n)
            LOG.append(mode)
        else:
            pass
        for i in range(n):
            result.append(i)
        return result

    def __ask(self, n):
        def inner():
            return n
        return inner()
'''


def edit(*steps, of="Runner.run"):
    return {"fix": (EditFunction(of, steps),)}


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "code", "expected"),
    [
        ("x = ...", "x = f(1)", True),
        ("x = ...", "y = f(1)", False),
        ("x = f(...)", "x = f(1, *a, k=2)", True),
        ("x = f(...)", "x = f()", True),
        ("x = f(..., 1)", "x = f(2, 1)", True),
        ("x = f(..., 1)", "x = f(2, 3)", False),
        ("if a: ...", "if a:\n  b\n  c", True),
        ("if a: ...", "if a:\n  b\nelse:\n  c", True),
        ("if a: ...\nelse: ...", "if a:\n  b\nelse:\n  c", True),
        ("if a: ...\nelse: ...", "if a:\n  b", False),
        ("if a: b", "if a:\n  b\nelse:\n  c", False),
        ("if a: ...", "if (a):  # why\n  b", True),
        ("x: ... = None", "x: int | None = None", True),
        ("x = 1", "x = 1.0", False),
        ("x = 1", "x = True", False),
        ("with a: ...", "async def f():\n  async with a: b", False),
        ("x = 'a'", "x = u'a'", True),
    ],
)
def test_patterns(pattern, code, expected):
    assert matches(ast.parse(pattern).body, ast.parse(code).body) is expected


# --- the steps ---


def test_move_takes_statements_out_of_an_inner_block():
    text = edited_text(
        "def f():\n a = 1\n with b:\n  c = 2\n  d = 3\n", Move("d = 3", before="a = 1")
    )
    assert text == "def f():\n    d = 3\n    a = 1\n    with b:\n        c = 2"


def test_move_that_would_leave_an_empty_block_is_refused():
    with pytest.raises(EditRefused, match="nothing would be left"):
        edited_text("def f():\n a = 1\n with b:\n  d = 3\n", Move("d = 3", before="a = 1"))


def test_insert_before_and_after():
    text = edited_text(
        "def f():\n a = 1\n b = 2\n",
        Insert("x = 0", before="a = 1"),
        Insert("y = 3", after="b = 2"),
    )
    assert text == "def f():\n    x = 0\n    a = 1\n    b = 2\n    y = 3"


def test_wrap_several_statements():
    text = edited_text(
        "def f(ctx):\n a = 1\n b = 2\n c = 3\n", Wrap("a = 1\nb = 2", context="ctx()")
    )
    assert text == "def f(ctx):\n    with ctx():\n        a = 1\n        b = 2\n    c = 3"


def test_rename_from_a_statement_to_the_end_of_its_block():
    text = edited_text(
        "def f(n, batch):\n g(n)\n if n:\n  h(n)\n  n.n(n=n)\n return n\n",
        Rename(start="h(n)", names={"n": "batch.n"}),
    )
    expected = "if n:\n        h(batch.n)\n        batch.n.n(n=batch.n)\n    return n"
    assert expected in text


@pytest.mark.parametrize(
    "statement",
    [
        "n = 1",
        "n += 1",
        "del n",
        "for n in (): pass",
        "h(lambda n: n)",
        "import math as n",
        "import n.math",
        "def n(): pass",
        "class n: pass",
        "try: pass\n except E as n: pass",
        "match m:\n  case n: pass",
        "match m:\n  case {**n}: pass",
    ],
)
def test_rename_of_a_name_that_is_assigned_is_refused(statement):
    source = f"def f(n, batch):\n g(n)\n {statement}\n"
    with pytest.raises(EditRefused, match="`n` is assigned"):
        edited_text(source, Rename(start="g(n)", names={"n": "batch.n"}))


def test_a_copy_of_one_statement_of_a_pattern_is_refused():
    source = "def f():\n a = 1\n a = 1\n b = 2\n"
    with pytest.raises(EditRefused, match="found 2"):
        edited_text(source, Insert("c = 3", after="a = 1\nb = 2"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a = 1\n if a:\n  b = 2\n  c = 3", "no way by `with` blocks alone"),
        ("if c:\n  a = 1\n b = 2", "no way by `with` blocks alone"),
        ("b = 2\n a = 1", "no way by `with` blocks alone"),
        ("a = 1\n n = 3\n b = n", "`n` does not have its value yet"),
        ("a = 1\n with c as n:\n  b = n\n  c = 3", "`n` does not have its value yet"),
    ],
)
def test_a_move_that_could_change_what_the_statements_do_is_refused(body, message):
    with pytest.raises(EditRefused, match=message):
        edited_text(f"def f(c, n):\n {body}\n", Move("b = ...", before="a = 1"))


def test_new_code_that_reads_an_unknown_name_is_refused():
    source = "import os\ndef f(n):\n a = 1\n"
    with pytest.raises(EditRefused, match="there is no `m`"):
        edited_text(source, Insert("b = m", after="a = 1"))
    assert "len(os.name) + n" in edited_text(source, Insert("b = len(os.name) + n", after="a = 1"))


@pytest.mark.parametrize("body", ["b = 1", "a = 1\n a = 1", "if c:\n  a = 1\n a = 1"])
def test_a_place_that_is_missing_or_ambiguous_is_refused(body):
    with pytest.raises(EditRefused, match=r"differs in f: expected one place like `a = 1`"):
        edited_text(f"def f():\n {body}\n", Insert("x", before="a = 1"))


@pytest.mark.parametrize("source", ["def g(): pass", "def f(): a\ndef f(): a", "f = 1"])
def test_a_function_that_is_missing_or_ambiguous_is_refused(source):
    with pytest.raises(EditRefused, match="found"):
        edited_text(source, Insert("x", before="a"))


# --- live functions ---


def test_edited_function_is_the_same_function(load):
    module = load(SOURCE)
    runner, function = module.Runner(), module.Runner.run
    bound = runner.run
    signature, code = inspect.signature(function), function.__code__
    editor = editor_of(module)
    editor.set_active(
        edit(
            Insert("size = 7", before="result = super().run(size)"),
            Wrap("for i in range(n): ...", context="scope()"),
        )
    )
    assert module.Runner.run is function
    assert bound() == runner.run(2) == ["base", 7, 0, 1]
    assert runner.run(1, loud=True) == ["base", 7, 0]
    assert module.LOG == ["in", "out", "in", "out", 1, "in", "out"]
    assert inspect.signature(function) == signature
    assert function.__doc__ == "Docstring."
    for name in ("co_name", "co_filename", "co_firstlineno", "co_freevars", "co_flags"):
        assert getattr(function.__code__, name) == getattr(code, name)
    if sys.version_info >= (3, 11):
        assert function.__code__.co_qualname == "Runner.run"
    editor.set_active({})
    assert function.__code__ is code
    assert bound() == ["base", 2, 0, 1]


def test_traceback_names_the_lines_of_the_file(load):
    module = load(SOURCE.replace("result.append(i)", "result.append(1 / 0)"))
    editor = editor_of(module)
    editor.set_active(edit(Move("for i in range(n): ...", before="if loud: ...")))
    with pytest.raises(ZeroDivisionError) as caught:
        module.Runner().run(1)
    last = traceback.extract_tb(caught.tb)[-1]
    assert last.filename == module.__spec__.origin
    assert last.line == "result.append(1 / 0)"


def test_inserted_code_claims_the_line_that_it_stands_before(load):
    module = load(SOURCE)
    editor_of(module).set_active(edit(Insert("1 / 0", before="size = n")))
    with pytest.raises(ZeroDivisionError) as caught:
        module.Runner().run(1)
    assert traceback.extract_tb(caught.tb)[-1].line == "size = n"


def test_static_and_wrapped_and_generator_functions(load):
    module = load(SOURCE)
    editor = editor_of(module)
    editor.set_active(
        {
            "a": (EditFunction("Runner.helper", (Insert("n = 10", before="return n + 1"),)),),
            "b": (EditFunction("scope", (Insert("LOG.append('b')", before="LOG.append('in')"),)),),
        }
    )
    assert module.Runner.helper(1) == 11
    with module.scope():
        pass
    assert module.LOG == ["b", "in", "out"]
    assert editor.foreign_wrappers("b") == []


def test_several_fixes_compose_and_each_can_go(load):
    module = load(SOURCE)
    editor = editor_of(module)
    one = (EditFunction("Runner.run", (Insert("size += 10", after="size = n"),)),)
    two = (EditFunction("Runner.run", (Insert("result.append('two')", before="return result"),)),)
    stock = module.Runner.run.__code__
    editor.set_active({"one": one, "two": two})
    both = module.Runner.run.__code__
    assert module.Runner().run(0) == ["base", 10, "two"]
    editor.set_active({"two": two})
    assert module.Runner().run(0) == ["base", 0, "two"]
    assert editor.is_live("two")
    editor.set_active({"one": one, "two": two})
    assert module.Runner.run.__code__ == both
    editor.set_active({})
    assert module.Runner.run.__code__ is stock
    assert not editor.is_live("one")


def test_a_refused_set_changes_nothing(load):
    module = load(SOURCE)
    editor = editor_of(module)
    good = edit(Insert("size += 10", after="size = n"))
    editor.set_active(good)
    code = module.Runner.run.__code__
    bad = {**good, "bad": (EditFunction("Runner.helper", (Insert("x", before="nowhere"),)),)}
    with pytest.raises(EditRefused):
        editor.set_active(bad)
    assert module.Runner.run.__code__ is code
    assert list(editor.active) == ["fix"]


def test_edit_beneath_a_wrapper_that_came_before(load):
    module = load(SOURCE)

    def patch(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return ["patched", *function(*args, **kwargs)]

        return wrapper

    module.Runner.run = patch(module.Runner.run)
    editor = editor_of(module)
    edits = edit(Insert("size += 10", after="size = n"))
    editor.set_active(edits)
    assert module.Runner().run(0) == ["patched", "base", 10]
    (note,) = editor.foreign_wrappers("fix")
    assert "edited beneath" in note
    assert "patch.<locals>.wrapper" in note or "test_code_edit.py" in note


def test_code_that_is_not_the_file_is_refused(load):
    module = load(SOURCE)
    module.Runner.run = lambda self, n=2, *, loud=False: []
    with pytest.raises(EditRefused, match="is not that of"):
        editor_of(module).set_active(edit(Insert("x", after="size = n")))


def test_a_member_that_hides_its_function_is_refused(load):
    module = load(SOURCE)
    module.Runner.run = functools.partial(module.Runner.run)
    with pytest.raises(EditRefused, match=r"replaced by a functools\.partial"):
        editor_of(module).set_active(edit(Insert("x", after="size = n")))


def test_a_missing_member_is_refused(load):
    module = load(SOURCE)
    del module.Runner.run
    with pytest.raises(EditRefused, match=r"has no Runner\.run"):
        editor_of(module).set_active(edit(Insert("x", after="size = n")))


def test_a_file_that_changed_after_the_decision_is_refused(load):
    module = load(SOURCE)
    with pytest.raises(EditRefused, match="has changed since"):
        SourceEditor(module, module.__spec__.origin, "0" * 64)


def test_a_module_from_elsewhere_is_refused(load, tmp_path):
    module = load(SOURCE)
    with pytest.raises(EditRefused, match="was loaded from"):
        SourceEditor(module, str(tmp_path / "other.py"), "")


def test_replaced_afterwards_is_not_live_and_a_later_wrapper_is(load):
    module = load(SOURCE)
    editor = editor_of(module)
    edits = edit(Insert("size += 10", after="size = n"))
    editor.set_active(edits)
    original = module.Runner.run
    module.Runner.run = functools.wraps(original)(lambda *a, **k: original(*a, **k))
    assert editor.is_live("fix")
    module.Runner.run = lambda *a, **k: original(*a, **k)
    assert not editor.is_live("fix")


def test_raise_when_called(load):
    module = load(SOURCE)
    stock = module.Runner.run
    restore = raise_when_called(module, "Runner.run", ValueError("refused"))
    with pytest.raises(ValueError, match="refused"):
        module.Runner().run(1)
    restore()
    assert module.Runner.run is stock
    raise_when_called(module, "Nowhere.run", ValueError("refused"))()
