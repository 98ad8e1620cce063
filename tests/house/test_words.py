"""Each word of a name is in the word table, or is a plain one; a new one is a decision."""

import pytest
from words import PLAIN, TABLE, defined, is_form_of, plain, used, words

pytestmark = pytest.mark.xdist_group("trees")


def test_words_of_names_are_in_the_table_or_plain():
    table, there = defined(TABLE.read_text()), used()
    known = plain() | {word for word in there if is_form_of(word, table)}
    found = {word: name for word, name in there.items() if word not in known}
    assert found == {}, f"define it in {TABLE.name}, use a word that is there, or add it: {PLAIN}"


def test_plain_words_are_used_and_not_in_the_table():
    table = defined(TABLE.read_text())
    assert sorted(word for word in plain() if is_form_of(word, table)) == []
    assert sorted(plain() - used().keys()) == []
    assert PLAIN.read_text().split() == sorted(plain())


def test_words_of_the_table_are_used():
    text = " ".join(
        path.read_text().lower() for path in (TABLE.parents[1] / "torch_ros").rglob("*.py")
    )
    assert sorted(word for word in defined(TABLE.read_text()) if word not in text) == []


def test_a_name_is_cut_into_words():
    assert words("HTTPFerry_of2") == ["http", "ferry", "of", "2"]
    table = "| feed, supply | a | b |\n## Shape\n| no | a | b |"
    assert defined(table) == {"feed", "supply"}
