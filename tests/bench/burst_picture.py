"""`python -m tests.bench.burst_picture FILE… > PICTURE.svg`: where the time of pods at once goes.

Draws what tests/peers/test_bursts.py left in build/bursts: one line for each pod, in the order
in which they became Ready, and below it for how long a lock was held.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

WIDTH: Final = 960
LEFT: Final = 16
SCALE: Final = WIDTH - 2 * LEFT
HEAD: Final = 34
"""Pixels above the lines of a run, for its title."""
WAITS: Final = "waits: the queue of kube-scheduler, and its back-off after a lock of another pod"
HAMI: Final = "HAMi's scheduler: filter, then the lock and the bind, with its own client queue"
NODE: Final = "the kubelet, and the agent's Allocate"
AGENT: Final = "the agent frees the lock"
STARTS: Final = "containerd starts the container"
COLOURS: Final = {
    WAITS: "#d9d9d9",
    HAMI: "#e6842a",
    NODE: "#2f7ebc",
    AGENT: "#137b80",
    STARTS: "#b5d99c",
}
PIECES: Final = (
    ("HAMi's scheduler: lock → bound", HAMI, "locked", "bound"),
    ("kubelet and Allocate: bound → answered", NODE, "bound", "answered"),
    ("agent: answered → lock gone", AGENT, "answered", "unlocked"),
)


class BurstRun(msgspec.Struct, frozen=True):
    """What one file tells: the moments of each pod by their name, in seconds."""

    title: str
    pods: dict[str, dict[str, Any]]

    @property
    def ready(self) -> float:
        """When the last pod was Ready."""
        return max(pod["ready"] for pod in self.pods.values())

    def median(self, begin: str, end: str) -> float:
        """The milliseconds between two moments, in the median of the pods."""
        return 1000 * statistics.median(pod[end] - pod[begin] for pod in self.pods.values())


def spans(pod: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What a pod was about, from when to when; what is not named it waited."""
    yield WAITS, pod["created"], pod["locked"]
    # The next attempt begins where kube-scheduler gave up to wait for this one.
    ends = [*pod["denied"], pod["bound"], *pod["filtered"]]
    for begin in pod["filtered"]:
        if begin < pod["bound"]:
            yield HAMI, begin, min(end for end in ends if end > begin)
    yield NODE, pod["bound"], pod["answered"]
    yield AGENT, pod["answered"], pod["unlocked"]
    yield STARTS, pod["unlocked"], pod["ready"]


def picture(runs: Sequence[BurstRun]) -> str:
    """The runs below each other on one axis of seconds, as SVG."""
    longest = max(run.ready for run in runs)
    body: list[str] = []
    y = 16
    for colour, words in ((colour, words) for words, colour in COLOURS.items()):
        body += _box(LEFT, y - 9, 12, 12, colour), _text(LEFT + 18, y + 1, words)
        y += 18
    for run in runs:
        body += _text(LEFT, y + 20, _title(run), weight="bold"), *_lines(run, y + HEAD, longest)
        y += HEAD + _height(run)
    body += _axis(y, longest)
    y += 44
    body.append(_text(LEFT, y + 12, "For how long a lock is held, median in ms", weight="bold"))
    most = max(run.median("locked", "unlocked") for run in runs)
    for run in runs:
        y += 22
        body += _bar(run, y, most)
    return _svg(y + 24, body)


def _title(run: BurstRun) -> str:
    lost = sum(len(pod["denied"]) for pod in run.pods.values())
    return f"{run.title}: all Ready after {run.ready:.1f} s, {lost} binds found the lock taken"


def _height(run: BurstRun) -> int:
    return len(run.pods) * _row(run)


def _row(run: BurstRun) -> int:
    return 7 if len(run.pods) <= 20 else 2


def _lines(run: BurstRun, top: int, longest: float) -> Iterator[str]:
    """One path for each colour: a burst has thousands of pieces."""
    row = _row(run)
    paths: dict[str, list[str]] = {what: [] for what in COLOURS}
    for number, pod in enumerate(sorted(run.pods.values(), key=lambda one: one["ready"])):
        y = top + number * row + row / 2
        for what, begin, end in spans(pod):
            length = max((end - begin) * SCALE / longest, 0.6)
            paths[what].append(f"M{LEFT + begin * SCALE / longest:.1f} {y:g}h{length:.1f}")
    for what, colour in COLOURS.items():
        yield f'<path stroke="{colour}" stroke-width="{row - 0.5}" d="{"".join(paths[what])}"/>'


def _axis(y: int, longest: float) -> Iterator[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 60, 120, 300) if longest / step <= 12)
    for second in range(0, int(longest) + 1, step):
        x = LEFT + second * SCALE / longest
        yield f'<path stroke="#888" d="M{x:.1f} {y + 4}v5"/>'
        yield _text(x, y + 22, f"{second} s")


def _bar(run: BurstRun, y: int, most: float) -> Iterator[str]:
    x = 330.0
    yield _text(LEFT, y + 12, run.title)
    for words, what, begin, end in PIECES:
        milliseconds = run.median(begin, end)
        width = milliseconds * (WIDTH - 420) / most
        yield _box(x, y + 2, width, 14, COLOURS[what], f"{words}: {milliseconds:.0f} ms")
        x += width
    yield _text(x + 6, y + 13, f"{run.median('locked', 'unlocked'):.0f}")


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}">{told}</rect>'


def _text(x: float, y: float, words: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(words)}</text>'


def _svg(height: int, body: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join((head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"))


def main() -> int:
    """Draw the files that were named."""
    names = [Path(name) for name in sys.argv[1:]]
    runs = [msgspec.convert(json.loads(name.read_text()), BurstRun) for name in names]
    sys.stdout.write(picture(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
