"""The live screen of `hami-agent top`. Imported only where the extra `cli` is installed."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static
from typing_extensions import override

from agent.cli.main import Unreachable
from agent.cli.status import (
    StatusRead,
    StatusStyle,
    attention_lines,
    gib,
    head_lines,
    pod_row,
    spark,
)
from agent.errors import cap

BAR: Final = 16
"""Characters of a bar."""
GPU_TITLES: Final = ("GPU", "HEALTH", "UTIL", "", "SLICES", "PROMISED", "", "USED", "15 MIN")
POD_TITLES: Final = (
    *("NAMESPACE", "POD", "CONTAINER", "GPU", "MEMORY", "USED"),
    *("CORES", "UTIL", "IDLE", "SINCE", "KUBELET"),
)


class TopScreen(App[None]):
    """Header, GPUs and containers; read again each `interval` seconds.

    `read` may block, so it runs on a thread. When it fails, the last values stay and the header
    says since when.
    """

    CSS: ClassVar[str] = """
    #head, #notes { height: auto; padding: 0 1; }
    #notes { color: $warning; }
    #trouble { height: auto; padding: 0 1; background: $error; color: $text; display: none; }
    DataTable { height: auto; max-height: 50%; padding: 0 1; }
    #pods { height: 1fr; max-height: 100%; }
    Input { display: none; height: 3; }
    Input.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "look_at('gpus')", "GPUs"),
        Binding("p", "look_at('pods')", "Containers"),
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
        yield Static(id="head", markup=False)
        yield DataTable(id="gpus", cursor_type="row", zebra_stripes=True)
        yield Static(id="notes", markup=False)
        yield Input(placeholder="namespace, pod or container", id="filter")
        yield DataTable(id="pods", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill the screen and begin to look."""
        self.query_one("#gpus", DataTable).add_columns(*GPU_TITLES)
        self.query_one("#pods", DataTable).add_columns(*POD_TITLES)
        self._show(self._last)
        self.query_one("#pods", DataTable).focus()
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

    def action_look_at(self, table: str) -> None:
        """Put the cursor into one of the tables."""
        self.query_one(f"#{table}", DataTable).focus()

    def action_filter(self) -> None:
        """Ask for a filter."""
        self.query_one("#filter", Input).add_class("shown").focus()

    def action_all(self) -> None:
        """Show all containers again."""
        entry = self.query_one("#filter", Input)
        entry.value = ""
        entry.remove_class("shown")
        self.action_look_at("pods")

    def action_sort(self) -> None:
        """Sort the containers by the next column."""
        self._column = (self._column + 1) % len(POD_TITLES)
        self._show(self._last)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._wanted = event.value.strip().lower()
        self._show(self._last)

    def on_input_submitted(self) -> None:
        """Go back to the table."""
        self.action_look_at("pods")

    def _fail(self, text: str) -> None:
        trouble = self.query_one("#trouble", Static)
        trouble.update(f"the values are of {self._last.at:%H:%M:%S} UTC: {text}")
        trouble.display = True

    def _show(self, read: StatusRead) -> None:
        self._last = read
        self.query_one("#trouble", Static).display = False
        style = StatusStyle(max(20, self.size.width - 2), ascii=self._plain)
        found, now = read.found, read.at
        self.query_one("#head", Static).update("\n".join(head_lines(found.node, now, style)))
        self.query_one("#notes", Static).update("\n".join(attention_lines(found, now, style)))
        gpus = [
            (
                str(gpu.uuid if gpu.index is None else gpu.index),
                f"{gpu.condition}, cordoned" if gpu.cordoned else gpu.condition,
                "-" if gpu.gpu_percent is None else f"{gpu.gpu_percent}%",
                self._bar((gpu.gpu_percent or 0) / 100),
                f"{gpu.slices_held}/{gpu.slices}",
                f"{gib(gpu.promised_mib)} of {gib(gpu.sellable_mib or None)}",
                self._bar(gpu.promised_mib / gpu.sellable_mib if gpu.sellable_mib else 0.0),
                f"{gib(gpu.used_mib)} of {gib(gpu.memory_mib)}",
                spark(gpu.history.gpu_percent if gpu.history else (), plain=self._plain),
            )
            for gpu in found.gpus
        ]
        _fill(self.query_one("#gpus", DataTable), gpus)
        pods = [pod_row(one, share, now) for one in found.allocations or () for share in one.shares]
        kept = [row for row in pods if self._wanted in " ".join(row[:3]).lower()]
        kept.sort(key=lambda row: (row[self._column], *row[:4]))
        _fill(self.query_one("#pods", DataTable), kept)

    def _bar(self, share: float) -> str:
        full = round(min(1.0, max(0.0, share)) * BAR)
        return ("#" * full).ljust(BAR, "-") if self._plain else ("█" * full).ljust(BAR, "░")


def _fill(table: "DataTable[str]", rows: Sequence[Sequence[str]]) -> None:
    """Replace the rows; the cursor stays at its row."""
    place = table.cursor_row
    table.clear()
    for row in rows:
        table.add_row(*(cap(cell, 64) for cell in row))
    if rows:
        table.move_cursor(row=min(place, len(rows) - 1))
