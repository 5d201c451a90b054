"""The edits that change what a function or class takes: parameters, keywords, fields, choices."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import sys
import textwrap
import threading

import pytest

from vllm_cgfix.code_edit import (
    AddField,
    AddKeyword,
    AddParameter,
    EditFunction,
    EditRefused,
    Expect,
    Guard,
    Insert,
    OneOf,
    Replace,
    Unchanged,
    Wrap,
    function_names,
)

from .samples import edited_text, editor_of

SOURCE = '''
import contextlib
from dataclasses import dataclass, field

@dataclass
class Context:
    name: str
    size: int = 0
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        assert self.size >= 0

    def own(self):
        pass

@dataclass(frozen=True)
class Frozen:
    name: str

@dataclass
class Own:
    name: str
    def __repr__(self):
        return "own"

@dataclass
class Options:
    name: str = field(repr=False)
    size: int = field(default=0, compare=False)

def create(name, size=3):
    """Docstring."""
    return Context(name, size=size)

@contextlib.contextmanager
def scope(name, size=3):
    yield create(name, size)

def relay(value):
    return value, value + 1
'''


# --- the steps ---


def test_replace_within_a_statement():
    text = edited_text(
        "def f(b, skip):\n a = g(1)\n return a, b\n",
        Replace("a", by="None if skip else ...", within="return a, b"),
    )
    assert text.endswith("return (None if skip else a, b)")


def test_replace_anywhere_and_ambiguous():
    text = edited_text("def f(h):\n x = g(1) + 2\n", Replace("g(...)", by="h()"))
    assert text.endswith("x = h() + 2")
    with pytest.raises(EditRefused, match=r"one place like `g\(...\)`, found 2"):
        edited_text("def f():\n x = g(1) + g(2)\n", Replace("g(...)", by="h()"))


def test_replace_what_is_given_a_value():
    text = edited_text(
        "def f(a, n):\n a[-1] += n\n b[0] = n\n",
        Replace("a[-1]", by="a[n:]", within="a[-1] += n"),
        Replace("b[0]", by="c", within="b[0] = n"),
    )
    assert text == "def f(a, n):\n    a[n:] += n\n    c = n"
    with pytest.raises(EditRefused, match=r"`g\(\)` cannot be given a value"):
        edited_text("def f(a):\n a[-1] += 1\n", Replace("a[-1]", by="g()"))


def test_add_keyword():
    source = "def f(a, b):\n return g(1, k=2)\n"
    assert edited_text(source, AddKeyword("g(...)", "skip", "a or b")).endswith(
        "g(1, k=2, skip=a or b)"
    )


@pytest.mark.parametrize("call", ["g(skip=1)", "g(**kw)"])
def test_add_keyword_that_may_be_there_is_refused(call):
    with pytest.raises(EditRefused, match="may pass skip already"):
        edited_text(f"def f():\n return {call}\n", AddKeyword("g(...)", "skip", "1"))


@pytest.mark.parametrize("parameters", ["*a", "*, k", "**k", "skip", "skip, /"])
def test_add_parameter_refuses_what_it_would_not_come_last_in(parameters):
    with pytest.raises(EditRefused, match=r"parameters behind|the name `skip`"):
        edited_text(f"def f({parameters}):\n pass\n", AddParameter("skip", False))


def test_wrap_every_place_or_none():
    source = textwrap.dedent(
        """
        def f(s):
            g(1)
            g(2)
            if a:
                g(3)
        """
    )
    text = edited_text(source, Wrap("g(...)", context="s()", times=3))
    assert text.count("with s():\n") == 3
    with pytest.raises(EditRefused, match=r"expected 2 places like `g\(...\)`, found 3"):
        edited_text(source, Wrap("g(...)", context="s()", times=2))
    within = "if a:\n g(3)"
    with pytest.raises(EditRefused, match=r"expected 3 places like `g\(...\)`, found 1"):
        edited_text(source, Wrap("g(...)", context="s()", times=3, within=within))
    with pytest.raises(EditRefused, match=r"expected one place like `g\(...\)`, found 3"):
        edited_text(source, Wrap("g(...)", context="s()", within=within))
    text = edited_text(source, Wrap("g(3)", context="s()", within=within))
    assert text.endswith("if a:\n        with s():\n            g(3)")


LOOP = textwrap.dedent(
    """
    def f(self):
        while True:
            if idle:
                continue
            {work}
            self.ask()
    """
)


@pytest.mark.parametrize("work", ["self.work()", "with log():\n            self.work()"])
def test_guard(work):
    pattern = work.replace("            ", " ")
    text = edited_text(
        LOOP.format(work=work), Guard(pattern, "self.awake", after="if idle:\n continue")
    )
    guarded = work.replace("            ", " " * 16)
    assert f"continue\n        if self.awake:\n            {guarded}\n        self.ask()" in text


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("other()\n        self.work()", "expected one place"),
        ("with log():\n            self.work()", "expected one place"),
        ("self.work()\n        self.work()", "expected one place like .*, found 2"),
        ("self.work()\n        if other:\n            self.work()", "like .*, found 2"),
        ("self.work(x := 1)", "`x` would not always get its value"),
    ],
)
def test_guard_of_something_else_is_refused(work, reason):
    pattern = "self.work(...)" if "x :=" in work else "self.work()"
    with pytest.raises(EditRefused, match=reason):
        edited_text(
            LOOP.format(work=work), Guard(pattern, "self.awake", after="if idle:\n continue")
        )


def test_guard_knows_copies_of_what_is_within():
    work = "with log():\n            self.work()\n        self.work()"
    with pytest.raises(EditRefused, match=r"expected one place like `with log.*found 2"):
        edited_text(
            LOOP.format(work=work),
            Guard("with log():\n self.work()", "self.awake", after="if idle:\n continue"),
        )


def test_expect_changes_nothing_or_refuses():
    source = "def f(a):\n    a = g(a)\n    a = h(a)"
    checks = Expect("a = g(...)"), Expect("a = ...", times=2), Expect("b = ...", times=0)
    assert edited_text(source, *checks) == source
    with pytest.raises(EditRefused, match=r"expected one place like `a = \.\.\.`, found 2"):
        edited_text(source, Expect("a = ..."))
    with pytest.raises(EditRefused, match=r"expected 0 places like .*, found 1"):
        edited_text(source, Expect("a = h(...)", times=0))


@pytest.mark.parametrize("use", ["helper = 1", "print(helper)", "def helper(): pass"])
def test_names_of_the_imports_must_be_free(use):
    edit = EditFunction("f", (Insert("helper()", before="a"),), imports="from m import helper")
    with pytest.raises(EditRefused, match="structure differs in f: it uses the name `helper`"):
        edit.apply(ast.parse(f"def f():\n a\n {use}\n"))
    edit.apply(ast.parse("def f():\n a\n"))


# --- live ---


def test_added_parameter_is_last_and_has_its_default(load):
    module = load(SOURCE)
    editor = editor_of(module)
    create, scope = module.create, module.scope
    stock = create.__code__, create.__defaults__
    editor.set_active(
        {
            "fix": (
                AddField("Context", "skip", bool, False),
                EditFunction(
                    "create",
                    (AddParameter("skip", False), AddKeyword("Context(...)", "skip", "skip")),
                ),
                EditFunction(
                    "scope",
                    (AddParameter("skip", False), AddKeyword("create(...)", "skip", "skip")),
                ),
            )
        }
    )
    assert list(inspect.signature(create).parameters) == ["name", "size", "skip"]
    assert create("a") == module.Context("a", 3, {}, False)
    assert create("a", 1, True).skip is True
    with scope("a", skip=True) as context:
        assert context.skip
    with scope("a", 5) as context:
        assert (context.size, context.skip) == (5, False)
    assert create.__doc__ == "Docstring."
    editor.set_active({})
    assert (create.__code__, create.__defaults__) == stock
    assert create.__code__ is stock[0]
    assert list(inspect.signature(scope).parameters) == ["name", "size"]


def test_imports_stand_below_the_docstring(load):
    module = load(SOURCE)
    editor_of(module).set_active(
        {
            "fix": (
                EditFunction(
                    "create",
                    (Insert("size += isqrt(16)", before="return Context(name, size=size)"),),
                    imports="from math import isqrt",
                ),
            )
        }
    )
    assert module.create("a").size == 7
    assert module.create.__doc__ == "Docstring."
    assert not hasattr(module, "isqrt")


def test_added_field_and_undo(load):
    module = load(SOURCE)
    context = module.Context
    before = pickle.loads(pickle.dumps(context("old", 1)))  # leaves __slotnames__ in the class
    entries = dict(vars(context))
    editor = editor_of(module)
    editor.set_active({"fix": (AddField("Context", "skip", bool, False),)})
    assert module.Context is context
    assert [f.name for f in dataclasses.fields(context)] == ["name", "size", "extra", "skip"]
    assert context.__match_args__ == ("name", "size", "extra", "skip")
    assert context.__annotations__["skip"] is bool
    assert before.skip is False  # made before the edit
    made = context("a", 1, {"k": 1}, True)
    assert repr(made) == "Context(name='a', size=1, extra={'k': 1}, skip=True)"
    assert made != context("a", 1, {"k": 1})
    assert context("a").extra is not context("b").extra
    assert dataclasses.replace(made, skip=False) == context("a", 1, {"k": 1})
    assert pickle.loads(pickle.dumps(made)) == copy.copy(made) == made
    assert "skip" in context.__doc__
    with pytest.raises(AssertionError):
        context("a", -1)
    assert editor.is_live("fix")
    editor.set_active({})
    after = dict(vars(context))
    assert list(inspect.signature(context).parameters) == ["name", "size", "extra"]
    assert {name: value for name, value in after.items() if name != "__annotations__"} == {
        name: value for name, value in entries.items() if name != "__annotations__"
    }
    assert list(context.__annotations__) == ["name", "size", "extra"]
    assert not editor.is_live("fix")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (AddField("Context", "size", bool, False), "has size already"),
        (AddField("Context", "own", bool, False), "has own already"),
        (AddField("Frozen", "skip", bool, False), "not a plain dataclass"),
        (AddField("Own", "skip", bool, False), "not a plain dataclass"),
        (AddField("create", "skip", bool, False), "class create"),
        (AddField("Nowhere", "skip", bool, False), "found 0|has no Nowhere"),
    ],
)
def test_a_class_that_is_not_as_expected_is_refused(load, edit, reason):
    module = load(SOURCE)
    with pytest.raises(EditRefused, match=reason):
        editor_of(module).set_active({"fix": (edit,)})


def test_a_class_that_others_have_changed_is_refused(load):
    module = load(SOURCE)
    module.Context = dataclasses.make_dataclass("Context", ["name"])
    with pytest.raises(EditRefused, match="has not the fields of its source"):
        editor_of(module).set_active({"fix": (AddField("Context", "skip", bool, False),)})


def test_options_of_fields_are_kept(load):
    module = load(SOURCE)
    editor = editor_of(module)
    editor.set_active({"fix": (AddField("Options", "skip", bool, False),)})
    assert repr(module.Options("a")) == "Options(size=0, skip=False)"
    assert module.Options("a", 1) == module.Options("a", 2) != module.Options("a", 2, True)
    editor.set_active({})
    assert repr(module.Options("a")) == "Options(size=0)"
    assert module.Options("a", 1) == module.Options("a", 2) != module.Options("b", 2)


def test_methods_that_others_have_put_there_are_refused_or_left_alone(load):
    module = load(SOURCE)
    field = AddField("Context", "skip", bool, False)
    stock = module.Context.__init__

    def wrapper(self, *args, **kwargs):
        stock(self, *args, **kwargs)

    module.Context.__init__ = wrapper
    with pytest.raises(EditRefused, match="constructor or comparison of Context has been replaced"):
        editor_of(module).set_active({"fix": (field,)})
    module.Context.__init__ = stock
    editor = editor_of(module)
    editor.set_active({"fix": (field,)})
    assert editor.is_live("fix")
    module.Context.__init__ = wrapper
    assert not editor.is_live("fix")
    editor.set_active({})
    assert module.Context.__init__ is wrapper


def test_other_threads_never_see_half_of_it(load):
    module = load(SOURCE)
    editor = editor_of(module)
    edits = (
        AddField("Context", "skip", bool, False),
        EditFunction("create", (AddKeyword("Context(...)", "skip", "True"),)),
    )
    raised, made, done = [], [], threading.Event()

    def call():
        while not done.is_set():
            try:
                made.append(module.create("a"))
            except TypeError as error:
                raised.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(20):
            editor.set_active({"fix": edits})
            editor.set_active({})
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert made
    assert raised == []


def test_the_one_alternative_that_is_possible(load):
    module = load(SOURCE)
    editor = editor_of(module)
    good = EditFunction("relay", (Replace("value + 1", by="value - 1"),))
    other = EditFunction("elsewhere", ())
    choice = OneOf(((other,), (good,)))
    assert function_names([choice]) == ["elsewhere", "relay"]
    editor.set_active({"fix": (choice,)})
    assert module.relay(1) == (1, 0)
    editor.set_active({})
    with pytest.raises(EditRefused, match="found 0"):
        editor.set_active({"fix": (OneOf(((other,), (other,))),)})
    with pytest.raises(EditRefused, match="several alternatives"):
        editor.set_active({"fix": (OneOf(((good,), (good,))),)})
    assert module.relay(1) == (1, 2)


def test_an_alternative_in_which_nothing_is_to_be_done(load):
    module = load(SOURCE)
    editor = editor_of(module)
    edit = EditFunction("relay", (Replace("value + 1", by="value - 1"),))
    choice = OneOf(
        (
            (EditFunction("create", (Replace("missing", by="None"),)),),
            (Unchanged("create", "return Context(name, size=size)"),),
        )
    )
    stock = module.create.__code__
    editor.set_active({"fix": (edit, choice)})
    assert module.relay(1) == (1, 0)
    assert module.create.__code__ is stock
    assert editor.is_live("fix")
    editor.set_active({})
    other = OneOf(((Unchanged("create", "return Context(name)"),),))
    with pytest.raises(EditRefused, match=r"create: its body is not `return Context\(name\)`"):
        editor.set_active({"fix": (edit, other)})
    assert module.relay(1) == (1, 2)
