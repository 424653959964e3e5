"""`pyspac top`: a board in, a live picture of it in the terminal out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Sparkline, Static

from pyspac.server.figures import figures
from pyspac.server.heat_map import HeatMap, legend
from pyspac.server.snapshot import BoardWatch, Observation

N_HISTORY: Final = 60
_SPEED: Final = "tokens/s"  # the only one of a server without a device
_CHARTS: Final[dict[str, Callable[[Observation], float | None]]] = {
    _SPEED: lambda seen: seen.tokens_per_s,
    "covered": lambda seen: seen.covered,
    "loads/s": lambda seen: seen.loads_per_s,
}


class Chart(Vertical):
    """A title with the last value, and its history."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self._values: deque[float] = deque([0.0] * N_HISTORY, maxlen=N_HISTORY)

    def compose(self) -> ComposeResult:
        yield Static(self.title, classes="title")
        yield Sparkline(list(self._values), summary_function=max)

    def add(self, value: float | None, text: str) -> None:
        """A value, and how it is written."""
        self._values.append(value or 0.0)
        self.query_one(Sparkline).data = list(self._values)
        self.query_one(Static).update(Text.assemble((self.title, "dim"), "  ", (text, "bold")))


class LiveView(App[None]):
    """Looks at the board twice a second, and ends when its server does."""

    TITLE = "pyspac top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit"), Binding("space", "pause", "pause")]
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #charts { height: 5; }
    Chart { padding: 0 1; border-right: solid $panel; }
    Chart Sparkline { height: 3; }
    #figures { height: auto; padding: 0 1; }
    #legend { height: 1; }
    """

    def __init__(
        self, title: str, watch: BoardWatch, is_there: Callable[[], bool], period_s: float = 0.5
    ) -> None:
        """title: of the first line. is_there: whether the server still runs."""
        super().__init__()
        self._headline = title
        self._watch = watch
        self._is_there = is_there
        self._period_s = period_s
        self._heat_map = HeatMap()
        self._is_paused = False

    def compose(self) -> ComposeResult:
        yield Static(self._headline, id="head", markup=False)
        with Horizontal(id="charts"):
            for title in _CHARTS if self._watch.board.n_slots else [_SPEED]:
                yield Chart(title)
        yield Static(id="figures")
        yield Static(legend(has_tier=bool(self._watch.board.tier["n_slots"][0])), id="legend")
        with VerticalScroll():
            yield Static(id="map")
        yield Footer()

    def on_mount(self) -> None:
        self.theme = "textual-dark"
        self.set_interval(self._period_s, self.refresh_view)
        self.call_after_refresh(self.refresh_view)

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused

    def refresh_view(self) -> None:
        """Look, and draw."""
        if not self._is_there():
            self.exit(message="the server is gone", return_code=1)
        elif not self._is_paused:
            self.show(self._watch.look())

    def show(self, seen: Observation) -> None:
        """Draw one observation."""
        texts = figures(seen)
        for chart in self.query(Chart):
            chart.add(_CHARTS[chart.title](seen), texts[chart.title])
        rest = {title: text for title, text in texts.items() if title not in _CHARTS}
        self.query_one("#figures", Static).update(_line(rest))
        area = self.query_one(VerticalScroll).size
        self.query_one("#map", Static).update(self._heat_map.draw(seen, area.width, area.height))


def _line(texts: dict[str, str]) -> Text:
    """Figures side by side; names dim, values bold."""
    parts = (Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in texts.items())
    return Text("   ").join(parts)
