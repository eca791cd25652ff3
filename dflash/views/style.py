"""Colours, fonts and number formats that all views share.

Series colours are Okabe and Ito's, distinguishable with the common forms of colour blindness; black and
yellow are left out because one of them vanishes on a dark or on a light page. INK is readable on both (4.5 :
1 on white, 4.2 : 1 on JupyterLab's dark grey), so that a transparent figure needs no theme.
"""

from __future__ import annotations

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8A8A"
SERIES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY)
DASHES = ("solid", "dash", "dot")
INK = "#767676"
GRID = "rgba(128,128,128,0.22)"
SEQUENTIAL = "Cividis"  # colour-blind-safe, in plotly and (lower case) in matplotlib
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
GIB = 2.0**30

# Work is filled in a colour, waiting is grey: the eye should find the gaps.
SPAN_COLOURS = {
    "forward": BLUE,
    "backward": "#004C77",
    "optimizer": PURPLE,
    "forward+backward": BLUE,
    "capture": GREEN,
    "reduce": VERMILLION,
    "compile": ORANGE,
    "warmup": ORANGE,
    "evaluate": SKY,
    "wait": "#C4C4C4",
    "idle": "#A08F7A",
}


def series_style(index: int) -> tuple[str, str]:
    """(colour, dash) of the index-th series; unique for the first 21."""
    return SERIES[index % len(SERIES)], DASHES[index // len(SERIES) % len(DASHES)]


def span_colour(name: str) -> str:
    """Colour of a span by its name; a name not listed gets a fixed one of the palette."""
    if name in SPAN_COLOURS:
        return SPAN_COLOURS[name]
    return SERIES[sum(map(ord, name)) % len(SERIES)]


def duration(seconds: float | None) -> str:
    """`95` -> `1 min 35 s`."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(round(seconds)), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def gib(value: float | None) -> str:
    """Bytes as GiB with sensible digits."""
    if value is None:
        return "unknown"
    amount = value / GIB
    return f"{amount:.2f} GiB" if amount < 10 else f"{amount:.1f} GiB"


def number(value: float | None, digits: int = 2) -> str:
    """`12345.6` -> `12,346`; small numbers keep `digits` decimals; nothing -> `-`."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def clip(text: str, limit: int) -> str:
    """At most about `limit` characters, cut between words."""
    text = str(text)
    return text if len(text) <= limit else f"{text[:limit].rsplit(None, 1)[0]} ..."
