"""One look for every figure: dark ink on an opaque light card, and one colour a rank.

The card reads in light and dark themes alike, since nothing of the page shows through it.
Imports matplotlib alone, and only when a figure is drawn: ranks need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CARD, PANEL = "#fbfbf8", "#eef0ec"  # the figure's ground, and an area set apart on it
INK, PAPER = "#24292f", "#ffffff"  # text on a light ground, and on a dark one

RANK_COLOURS = (
    *("#2f6db5", "#94400c", "#20a27e", "#6a1d51"),  # blue, rust, green, plum
    *("#690dc8", "#b08b03", "#4f3924", "#1f9db0"),  # violet, mustard, brown, cyan
)
"""Rank r has colour r, modulo their number. Each stands out from the card, and they differ in
lightness too, so that readers who see few hues can tell them apart. One device alone is rank 0."""


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every figure."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def ink_on(ground: str) -> str:
    """The text colour that reads best on a ground: INK or PAPER."""
    return max((INK, PAPER), key=lambda ink: contrast(ink, ground))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2.2 defines it: 1 (none) to 21 (black on white)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    from matplotlib.colors import to_rgb

    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in to_rgb(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def card(columns: int = 1, width: float = 3.6, height: float = 2.8) -> tuple[Figure, Any]:
    """A figure with axes side by side, and its axes; width: of each, in inches.

    It is closed for pyplot, so that only the cell that returns it shows it.
    """
    import matplotlib.pyplot as plt

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {"axes.spines.top": False, "axes.spines.right": False}
    style |= {"figure.facecolor": CARD, "axes.facecolor": CARD} | dict.fromkeys(inks, INK)
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, columns, figsize=(width * columns + 1, height), layout="constrained"
        )
    for axis in figure.axes:
        axis.tick_params(colors=INK)  # ticks are made when drawn, outside the context
    plt.close(figure)
    return figure, axes


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that many inches to draw shapes on, without axes; its units are inches."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height), facecolor=CARD)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axis.axis("off")
    plt.close(figure)
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, height: float, ground: str = PANEL) -> None:
    """A rounded box whose lower left corner is at (x, y)."""
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=ground, ec="none"
    )
    axis.add_patch(shape)


def write(axis: Axes, x: float, y: float, text: str, size: float = 9, **options: Any) -> None:
    """Text around (x, y) in dark ink, unless `options` (matplotlib's) say otherwise."""
    options = {"ha": "center", "va": "center", "color": INK, **options}
    axis.text(x, y, text, fontsize=size, **options)
