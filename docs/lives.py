"""Draws a call's life, as torch_ros/protocol/life.py has it, into docs/protocol/life.md.

python docs/lives.py
"""

from pathlib import Path

from torch_ros.protocol.life import TABLE, CallLife

PAGE = Path(__file__).parent / "protocol" / "life.md"
BEGIN, END = "<!-- lives -->\n", "<!-- end of lives -->\n"


def lives() -> str:
    rows = (f"| {life.name} | {life.value} |\n" for life in CallLife)
    return f"| state | what it says |\n| --- | --- |\n{''.join(rows)}"


def moves() -> str:
    rows = (
        f"| {event.value} | {', '.join(life.name for life in lives)} "
        f"| {to.name if to else 'stays'} | {written} |\n"
        for lives, event, to, written in TABLE
    )
    return f"| event | in | then | written |\n| --- | --- | --- | --- |\n{''.join(rows)}"


def drawn(page: str) -> str:
    """The page, with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lives()}\n{moves()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
