"""`torch-ros top`: a table of replicas in a terminal, as it changes."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events, on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from torch_ros.cli import asking, lines, screen, waiting
from torch_ros.cli.headway import Headway, Look
from torch_ros.cli.lines import Line
from torch_ros.errors import BackendError, TorchRosError
from torch_ros.fleet.fleet import Fleet
from torch_ros.printable import printable
from torch_ros.store.kv import KV

BAD, WARNS = {"gone", "refused", "not offered"}, {"draining", "joining", "left", "lingering"}


END_S = 10.0  # for the look that is under way
LOOK_S = 0.5  # between two looks at how far reads are


def show(kv: KV, model: str, look: Look | None = None) -> None:
    """Draw until somebody quits.

    Args:
        look: Says how far those are that fill, by `inst`. It is asked in a thread of its own.

    Raises: UsageError: There is no such model.
    """
    asking.fleet_of(kv, model)
    over = threading.Event()
    top = Top(kv.endpoint, lambda replica: waiting.lines(asking.why(kv, model, replica, None)))

    def watch() -> None:
        for found in asking.fleets(kv, model, over):
            top.post_message(Seen(found))

    def ask() -> None:
        while look is not None and not over.wait(LOOK_S):
            if top.fleet is None:
                continue
            try:
                top.post_message(Headways(look(top.fleet)))
            except BackendError:
                continue  # the watch says so

    threads = [threading.Thread(target=each, daemon=True) for each in (watch, ask)]
    for thread in threads:
        thread.start()
    try:
        top.run()
    finally:
        over.set()
        threads[1].join(END_S)  # what it asks with is closed after this


class Seen(Message):
    """A fleet with its lines, which take a while if there are many; or why it cannot be told."""

    def __init__(self, found: Fleet | BackendError) -> None:
        super().__init__()
        self.found = found
        self.lines: list[Line] = lines.lines(found) if isinstance(found, Fleet) else []


class Headways(Message):
    """How far those are that fill, by `inst`."""

    def __init__(self, found: Mapping[str, Headway]) -> None:
        super().__init__()
        self.found = found


class Rows(ScrollView, can_focus=True):
    """The table. It draws the rows that are seen, however many there are."""

    order: str
    chosen: str
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "end(0)", show=False),
        Binding("end", "end(-1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.lines: Sequence[Line] = ()
        self.order, self.chosen = "", ""

    def put(self, there: Sequence[Line], order: str) -> None:
        """Draw these, in their order, which has a name."""
        self.lines, self.order = there, order
        self.virtual_size: Size = Size(0, len(there) + 1)
        self.refresh()

    @property
    def place(self) -> int:
        """The number of the chosen replica's line; -1: it has none now."""
        return next((at for at, each in enumerate(self.lines) if each.replica == self.chosen), -1)

    def action_move(self, by: int) -> None:
        self._choose(self.place + by)

    def action_page(self, by: int) -> None:
        self._choose(self.place + by * max(1, self.size.height - 2))

    def action_end(self, at: int) -> None:
        self._choose(at % max(1, len(self.lines)))

    def _choose(self, at: int) -> None:
        if not self.lines:
            return
        at = min(max(0, at), len(self.lines) - 1)
        self.chosen = self.lines[at].replica
        top, shown = self.scroll_offset.y, max(1, self.size.height - 1)
        if not top <= at < top + shown:
            self.scroll_to(y=at if at < top else at - shown + 1, animate=False)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if event.y > 0:
            self._choose(self.scroll_offset.y + event.y - 1)

    def render_line(self, y: int) -> Strip:
        """A head that stays, and the rows below it."""
        strip = self._row(y).adjust_cell_length(self.size.width)
        return strip.apply_style(self.rich_style)

    def _row(self, y: int) -> Strip:
        columns, at = screen.columns(self.size.width), self.scroll_offset.y + y - 1
        if y == 0:
            return _strip((_head(each.name, self.order), cells, "bold") for each, cells in columns)
        if at >= len(self.lines):
            return Strip([])
        line = self.lines[at]
        tint = {"VERSION": screen.colour(line.fills or line.holds), "STATE": _alarm(line)}
        strip = _strip(
            (each.text(line), cells, tint.get(each.name) or "") for each, cells in columns
        ).adjust_cell_length(self.size.width)
        is_chosen = line.replica == self.chosen
        return strip.apply_style(Style(reverse=True)) if is_chosen else strip


def _head(name: str, order: str) -> str:
    return f"{name} ↓" if name.lower().startswith(order) else name


def _alarm(line: Line) -> str | None:
    if line.state in BAD:
        return "#ff6b6b"
    return "#ffb454" if line.state in WARNS or (line.behind > 1 and not line.fills) else None


def _strip(cells: Iterable[tuple[str, int, str]]) -> Strip:
    segments = [
        Segment(set_cell_size(printable(text), width) + " ", Style.parse(style))
        for text, width, style in cells
    ]
    return Strip(segments)


class Top(App[None]):
    """The screen. It is told of fleets with `Seen`.

    Args:
        why: Says what a replica waits for, in lines. It is asked in a thread of its own.
    """

    CSS = """
    #title, #newest, #trouble { height: 1; padding: 0 1; }
    #why { height: auto; max-height: 40%; padding: 0 1; background: $panel; display: none; }
    #why.is-there { display: block; }
    #title { text-style: bold; }
    #trouble { background: $error; color: $text; display: none; }
    #trouble.is-there { display: block; }
    Rows { height: 1fr; padding: 0 1; background: $background; scrollbar-size-vertical: 1;
        overflow-x: hidden; }
    Input { height: 1; border: none; padding: 0 1; display: none; }
    Input.is-there { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("r", "turn", "reverse"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("enter", "why", "why"),
        Binding("escape", "all", "all", key_display="esc"),
    ]

    def __init__(self, endpoint: str, why: Callable[[str], Iterable[str]]) -> None:
        super().__init__()
        self._endpoint, self._why = endpoint, why
        self.fleet: Fleet | None = None
        self._made: Mapping[str, Headway] = {}
        self._lines: Sequence[Line] = ()
        self._order, self._is_turned = 0, False

    def compose(self) -> ComposeResult:
        yield Static("waiting for etcd", id="title", markup=False)
        yield Static(id="newest")
        yield Static(id="trouble", markup=False)
        yield Rows()
        yield Static(id="why", markup=False)
        yield Input(placeholder="name, state, version or place", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Rows).focus()
        self.set_interval(1.0, self.query_one(Rows).refresh)  # what is shown gets older

    @on(Seen)
    def see(self, seen: Seen) -> None:
        trouble = self.query_one("#trouble", Static)
        trouble.set_class(not isinstance(seen.found, Fleet), "is-there")
        if isinstance(seen.found, Fleet):
            self.fleet, self._lines = seen.found, seen.lines
            if self._made:
                self._lines = lines.lines(seen.found, self._made)
            self._draw()
        else:
            trouble.update(f"{seen.found}")

    @on(Headways)
    def tell(self, made: Headways) -> None:
        if self.fleet is not None and (made.found or self._made):
            self._made = made.found
            self._lines = lines.lines(self.fleet, self._made)
            self._draw()

    @on(events.Resize)
    @on(Input.Changed)
    def _draw(self) -> None:
        if self.fleet is None:
            return
        name, key = screen.ORDERS[self._order]
        found = screen.chosen(self._lines, self.query_one(Input).value)
        found.sort(key=key, reverse=self._is_turned)
        self.query_one(Rows).put(found, name)
        title = screen.title(self.fleet, self._endpoint)
        self.query_one("#title", Static).update(printable(title))
        self.query_one("#newest", Static).update(self._spread(self.fleet))

    def _spread(self, fleet: Fleet) -> Text:
        spread = lines.spread(self._lines, fleet.latest)
        text = Text(screen.newest(fleet, spread) + "  ")
        room = min(screen.SPREAD_WIDTH, self.size.width - len(text) - 2)
        held, filling, rest = screen.bar(spread, max(0, room))
        tint = screen.colour(fleet.latest) or ""
        return text.append(held, tint).append(filling, tint).append(rest, "dim")

    @on(Input.Submitted)
    def action_table(self) -> None:
        """Go on in the table, of what the filter left."""
        field = self.query_one(Input)
        field.set_class(bool(field.value), "is-there")
        self.query_one(Rows).focus()

    def action_sort(self) -> None:
        self._order = (self._order + 1) % len(screen.ORDERS)
        self._draw()

    def action_turn(self) -> None:
        self._is_turned = not self._is_turned
        self._draw()

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.add_class("is-there")
        field.focus()

    @work(thread=True, exclusive=True)
    def action_why(self) -> None:
        """Ask for the one that holds the chosen replica up, as things are now."""
        if not (replica := self.query_one(Rows).chosen):
            return
        try:
            found = "\n".join(map(printable, self._why(replica)))
        except TorchRosError as error:
            found = f"{error}"
        self.call_from_thread(self._say, found)

    def _say(self, text: str) -> None:
        said = self.query_one("#why", Static)
        said.update(text)
        said.set_class(bool(text), "is-there")

    def action_all(self) -> None:
        self._say("")
        self.query_one(Input).value = ""
        self.action_table()
