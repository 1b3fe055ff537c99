"""The live screen of `hami-agent top`. Imported only where the extra `cli` is installed."""

from collections.abc import Callable
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static
from typing_extensions import override

from agent.cli.main import Unreachable
from agent.cli.status import POD_COLUMNS, StatusRead, StatusStyle, status_lines
from agent.errors import cap
from agent.web.view import pod_cells


class TopScreen(App[None]):
    """What `status` shows, and the containers; read again each `interval` seconds.

    `read` may block, so it runs on a thread. When it fails, the last values stay and the header
    says since when.
    """

    CSS: ClassVar[str] = """
    #node { height: auto; max-height: 60%; padding: 0 1; }
    #trouble { height: auto; padding: 0 1; background: $error; color: $text; display: none; }
    DataTable { height: 1fr; padding: 0 1; }
    Input { display: none; height: 3; }
    Input.shown { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("escape", "all", "All"),
        Binding("q", "quit", "Quit"),
    ]

    ENABLE_COMMAND_PALETTE: ClassVar[bool] = False

    def __init__(
        self,
        read: Callable[[], StatusRead],
        first: StatusRead,
        *,
        interval: float = 2.0,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self._read = read
        self._last = first
        self._interval = interval
        self._plain = plain
        self._wanted = ""
        self._column = 0

    @override
    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="trouble", markup=False)
        yield Static(id="node", markup=False)
        yield Input(placeholder="namespace, pod or container", id="filter")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill the screen and begin to look."""
        self.query_one(DataTable).add_columns(*(column.title for column in POD_COLUMNS))
        self._show(self._last)
        self.query_one(DataTable).focus()
        self.set_interval(self._interval, self.look)

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Read the status, on a thread."""
        try:
            found = self._read()
        except Unreachable as error:
            self.call_from_thread(self._fail, str(error))
        else:
            self.call_from_thread(self._show, found)

    def action_filter(self) -> None:
        """Ask for a filter."""
        self.query_one("#filter", Input).add_class("shown").focus()

    def action_all(self) -> None:
        """Show all containers again."""
        entry = self.query_one("#filter", Input)
        entry.value = ""
        entry.remove_class("shown")
        self.query_one(DataTable).focus()

    def action_sort(self) -> None:
        """Sort the containers by the next column."""
        self._column = (self._column + 1) % len(POD_COLUMNS)
        self._show(self._last)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._wanted = event.value.strip().lower()
        self._show(self._last)

    def on_input_submitted(self) -> None:
        """Go back to the table."""
        self.query_one(DataTable).focus()

    def _fail(self, text: str) -> None:
        """Say in the header since when nothing could be read."""
        trouble = self.query_one("#trouble", Static)
        trouble.update(f"the values are of {self._last.at:%H:%M:%S} UTC: {text}")
        trouble.display = True

    def _show(self, read: StatusRead) -> None:
        """Show what was read. Filter and order of the containers stay."""
        self._last = read
        self.query_one("#trouble", Static).display = False
        style = StatusStyle(max(20, self.size.width - 2), ascii=self._plain)
        lines = status_lines(read.found, read.at, style)
        self.query_one("#node", Static).update("\n".join(lines))

        pods = [
            pod_cells(one, share, read.at)
            for one in read.found.allocations or ()
            for share in one.shares
        ]

        rows = [row for row in pods if self._wanted in " ".join(row[:3]).lower()]
        rows.sort(key=lambda row: (row[self._column], *row[:4]))
        table = self.query_one(DataTable)
        place = table.cursor_row
        table.clear()

        for row in rows:
            table.add_row(*(cap(cell, 64) for cell in row))

        if rows:  # the cursor stays at its row
            table.move_cursor(row=min(place, len(rows) - 1))
