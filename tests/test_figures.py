"""Figures can be read: every label is there, whole, in its box, and stands out from its ground."""

from __future__ import annotations

import io
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from ddp_lab.figures import style
from ddp_lab.figures.layout import launch_layout, node_layout

matplotlib.use("agg")

DARK, LIGHT = "#111111", "#ffffff"  # JupyterLab's cells in its two themes

FIGURES = {
    **{f"nodes {n}x{p}": (node_layout, (n, p)) for n, p in ((2, 4), (2, 2), (3, 3), (1, 1))},
    **{f"launch {p}": (launch_layout, (p,)) for p in (1, 2, 4, 9)},
}


@pytest.fixture(params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Figure:
    draw, arguments = FIGURES[request.param]
    figure = draw(*arguments)
    figure.canvas.draw()
    return figure


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in texts(figure)]


def rank_of(box: FancyBboxPatch) -> tuple[float, ...]:
    return tuple(round(part, 3) for part in box.get_facecolor()[:3])


def test_nodes_show_every_number() -> None:
    shown = labels(node_layout(nnodes=2, nproc_per_node=3))
    assert [text for text in shown if text.startswith("RANK")] == [f"RANK={r}" for r in range(6)]
    local = [text for text in shown if text.startswith("LOCAL_RANK")]
    assert local == [f"LOCAL_RANK={r}" for r in (0, 1, 2, 0, 1, 2)]
    assert [text for text in shown if "GROUP_RANK" in text] == [
        "node 0   GROUP_RANK=0",
        "node 1   GROUP_RANK=1",
    ]
    assert "WORLD_SIZE=6   (2 nodes of 3 processes = 6)" in shown


def test_launch_shows_each_rank_and_what_travels() -> None:
    shown = labels(launch_layout(nproc_per_node=3))
    assert [text for text in shown if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert "this notebook" in shown
    assert sum("function and arguments" in text for text in shown) == 3
    assert sum("result" in text for text in shown) == 3


def test_a_rank_has_one_colour_in_all_figures() -> None:
    boxes = [
        [rank_of(box) for box in figure.findobj(FancyBboxPatch)]
        for figure in (node_layout(2, 2), node_layout(1, 4), launch_layout(4))
    ]
    for rank in range(4):
        colour = tuple(round(part, 3) for part in to_rgb(style.rank_colour(rank)))
        assert [found.count(colour) for found in boxes] == [1, 1, 1]


# How dichromats see linear RGB (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "trichromat": np.eye(3),
    "protanope": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranope": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def lab(colour: str, sight: object) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it; 2.3 is a difference that is just noticed."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(sight) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ seen / [0.9505, 1, 1.089])  # near enough in the dark
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_ranks_can_be_told_apart_by_colour_blind_readers_too(sight: str) -> None:
    colours = [style.rank_colour(rank) for rank in range(8)]
    for one, other in combinations(colours, 2):
        distance = np.linalg.norm(lab(one, SIGHTS[sight]) - lab(other, SIGHTS[sight]))
        assert distance > 20, (one, other)
    assert style.rank_colour(8) == style.rank_colour(0)


def test_contrast_is_that_of_the_standard() -> None:
    assert style.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert style.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert style.contrast("#123456", "#123456") == 1


def test_colours_stand_out_from_their_ground() -> None:
    """WCAG 2.2, AA: 4.5 for text, 3 for shapes."""
    assert style.contrast(style.INK, style.CARD) >= 4.5
    assert style.contrast(style.INK, style.PANEL) >= 4.5
    for colour in style.RANK_COLOURS:
        assert style.contrast(colour, style.CARD) >= 3, colour
        assert style.contrast(colour, style.ink_on(colour)) >= 4.5, colour


def test_every_text_stands_out_from_what_lies_under_it(figure: Figure) -> None:
    boxes = figure.findobj(FancyBboxPatch)
    for text in texts(figure):
        middle = text.get_window_extent().get_points().mean(axis=0)
        under = [box for box in boxes if box.get_window_extent().contains(*middle)]
        grounds = [matplotlib.colors.to_hex(box.get_facecolor()) for box in under]
        ground = [style.CARD, *grounds][-1]  # the box drawn last
        assert style.contrast(text.get_color(), ground) >= 4.5, (text.get_text(), ground)


def test_no_text_is_cut_or_leaves_its_box(figure: Figure) -> None:
    boxes = [box.get_window_extent() for box in figure.findobj(FancyBboxPatch)]
    for text in texts(figure):
        extent = text.get_window_extent()
        (left, bottom), (right, top) = extent.get_points()
        middle = ((left + right) / 2, (bottom + top) / 2)
        for box in [figure.bbox, *(box for box in boxes if box.contains(*middle))]:
            inside = box.x0 <= left and right <= box.x1 and box.y0 <= bottom and top <= box.y1
            assert inside, f"{text.get_text()!r} leaves its box"


def test_texts_do_not_overlap(figure: Figure) -> None:
    for one, other in combinations(texts(figure), 2):
        overlap = one.get_window_extent().overlaps(other.get_window_extent())
        assert not overlap, (one.get_text(), other.get_text())


def test_nothing_of_the_page_shows_through(figure: Figure) -> None:
    """In a dark theme, too, the ink stands on the light card."""
    for theme in (LIGHT, DARK):
        with matplotlib.rc_context({"figure.facecolor": theme, "savefig.facecolor": "auto"}):
            file = io.BytesIO()
            figure.savefig(file, format="png")
        pixels = imread(io.BytesIO(file.getvalue()))
        assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1.0
        assert pixels[2, 2, :3] == pytest.approx(to_rgb(style.CARD), abs=0.01)


def test_a_card_has_axes_in_dark_ink_and_is_shown_once() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figure, (left, right) = style.card(columns=2)
    assert plt.get_fignums() == before  # else a cell would show it twice
    left.set(xlabel="time (s)", ylabel="rank")
    assert figure.axes == [left, right]
    assert left.xaxis.label.get_color() == style.INK
    assert left.get_xticklabels()[0].get_color() == style.INK
    assert figure.get_facecolor()[:3] == pytest.approx(to_rgb(style.CARD))
