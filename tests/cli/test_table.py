"""Tables of text: every cell is there, in its column, and no line is wider than it may be."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torch_ros.cli.table import table

HEADER = ("NAME", "HELD BY", "")
ROWS = [("roll-0", "2", "a note"), ("roll-1", "12", "")]


def shown(rows, width, header=HEADER):
    return list(table(header, rows, width))


def test_cells_stand_below_their_heads():
    assert shown(ROWS, 80) == ["        HELD", "NAME    BY", "roll-0  2     a note", "roll-1  12"]


def test_the_widest_column_is_folded_between_words():
    row = ("roll-0", "2", "one two three four")
    assert shown([row], 26)[2:] == ["roll-0  2     one two", "              three four"]


def test_a_word_is_broken_only_where_it_must_be():
    row = ("a-name-of-20-letters", "2", "one two")
    assert shown([row], 31)[2:] == [
        "a-name-of-20-letters  2     one",
        "                            two",
    ]
    assert [line.split()[0] for line in shown([row], 28)[2:4]] == ["a-name-of-20-lett", "ers"]


def test_characters_of_two_cells_and_of_none_count_as_such():
    rows = [("模型", "2", "x"), ("e\u0301", "2", "x"), ("ab", "2", "x")]
    assert shown(rows, 80)[2:] == ["模型  2     x", "e\u0301     2     x", "ab    2     x"]


TEXT = st.text(
    st.characters(categories=("L", "N", "P"), max_codepoint=0x2FF, include_characters=" "),
    max_size=30,
)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5), st.integers(1, 90))
def test_no_letter_is_lost_and_no_line_is_too_wide(rows, width):
    lines = shown(rows, width)
    found = Counter("".join(lines))
    assert Counter("".join("".join(row) for row in rows).replace(" ", "")) <= found
    assert width < 16 or max(map(len, lines)) <= width
