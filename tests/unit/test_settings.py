"""The environment variables: what is valid, what it means, what the message says."""

from __future__ import annotations

import pytest

from vllm_cgfix import settings

IDS = ("one-fix", "two-fix")


def chosen(value: str) -> set[str]:
    return set(settings.read({"VLLM_CGFIX": value}).chosen(IDS))


@pytest.mark.parametrize("value", ["", "0", "off", "OFF", " off "])
def test_off(value):
    assert not settings.read({"VLLM_CGFIX": value}).words
    assert not settings.read({}).words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", {"one-fix", "two-fix"}),
        ("on", {"one-fix", "two-fix"}),
        ("ALL", {"one-fix", "two-fix"}),
        ("one-fix", {"one-fix"}),
        (" one-fix , two-fix ", {"one-fix", "two-fix"}),
        ("all,-one-fix", {"two-fix"}),
        ("-one-fix,all", {"two-fix"}),
        ("1,-one-fix", {"two-fix"}),
        ("all,-one-fix,-two-fix", set()),
        ("one-fix,one-fix", {"one-fix"}),
    ],
)
def test_chosen(value, expected):
    assert chosen(value) == expected


@pytest.mark.parametrize(
    "value", ["one-fx", "maybe", "all,-nothing", "--one-fix", "-all", "one-fix;two-fix", "true"]
)
def test_an_unknown_word_lists_the_valid_ones(value):
    with pytest.raises(settings.SettingsError, match=r"VLLM_CGFIX.*one-fix, two-fix"):
        chosen(value)


@pytest.mark.parametrize("value", ["0,all", "all,off", "one-fix,", ",", "all,,one-fix"])
def test_off_cannot_stand_in_a_list(value):
    with pytest.raises(settings.SettingsError, match="cannot stand in a list"):
        chosen(value)


def test_only_leaving_out_says_how_to_write_it():
    with pytest.raises(settings.SettingsError, match="VLLM_CGFIX=all,-one-fix"):
        chosen("-one-fix")


@pytest.mark.parametrize("name", ["STRICT", "UNVERIFIED"])
def test_switches(name):
    variable, attribute = f"VLLM_CGFIX_{name}", name.lower()
    for value, expected in [("1", True), ("on", True), ("0", False), ("", False), ("off", False)]:
        assert getattr(settings.read({variable: value}), attribute) is expected
    with pytest.raises(settings.SettingsError, match=f"{variable}: 'perhaps'.*1, on, 0, off"):
        settings.read({variable: "perhaps"})


def test_a_misspelt_variable_is_an_error_even_when_off():
    with pytest.raises(settings.SettingsError, match=r"VLLM_CGFIX_STRIKT.*VLLM_CGFIX_STRICT"):
        settings.read({"VLLM_CGFIX_STRIKT": "1"})
