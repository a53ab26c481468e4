"""Where ranks live: the notebook and its ranks, and ranks on machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_lab.figures.style import box, canvas, ink_on, rank_colour, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _GAP = 0.94, 0.72, 0.12  # inches: the box of a rank


def node_layout(nnodes: int = 2, nproc_per_node: int = 4) -> Figure:
    """Ranks as boxes on their machines, each with its rank and its local rank."""
    row = nproc_per_node * (_WIDTH + _GAP) - _GAP
    node = max(row + 2 * _GAP, 2.2)  # room for the title
    figure, axis = canvas(max(4.6, nnodes * (node + _GAP) + _GAP), 2.05)
    middle = axis.get_xlim()[1] / 2
    for number in range(nnodes):
        left = middle + (number - nnodes / 2) * (node + _GAP) + _GAP / 2
        box(axis, left, 0.5, node, 1.43)
        title = f"node {number}   GROUP_RANK={number}"
        write(axis, left + node / 2, 1.7, title, 10, weight="bold")
        for local in range(nproc_per_node):
            x = left + (node - row) / 2 + local * (_WIDTH + _GAP)
            rank = number * nproc_per_node + local
            _rank_box(axis, x, 0.62, rank, f"RANK={rank}", f"LOCAL_RANK={local}")
    processes = "process" if nproc_per_node == 1 else "processes"
    nodes = "1 node" if nnodes == 1 else f"{nnodes} nodes"
    count = f"{nodes} of {nproc_per_node} {processes} = {nnodes * nproc_per_node}"
    write(axis, middle, 0.25, f"WORLD_SIZE={nnodes * nproc_per_node}   ({count})", 10)
    return figure


def launch_layout(nproc_per_node: int = 4) -> Figure:
    """The notebook's process, the processes of its ranks, and what travels between them."""
    step = _HEIGHT + _GAP
    height = nproc_per_node * step + _GAP
    figure, axis = canvas(7.4, height)
    box(axis, _GAP, _GAP, 2.3, height - 2 * _GAP)
    write(axis, 1.27, height / 2 + 0.15, "this notebook", 11, weight="bold")
    write(axis, 1.27, height / 2 - 0.15, "one process")
    for rank in range(nproc_per_node):
        y = height - (rank + 1) * step
        centre = y + _HEIGHT / 2
        _rank_box(axis, 5.33, y, rank, f"rank {rank}", "a process of its own", width=1.95)
        _arrow(axis, 2.5, 5.25, centre + 0.05, rank)
        _arrow(axis, 5.25, 2.5, centre - 0.05, rank)
        write(axis, 3.87, centre + 0.19, "copies of function and arguments")
        write(axis, 3.87, centre - 0.2, "printed lines, copy of the result")
    return figure


def _rank_box(
    axis: Axes, x: float, y: float, rank: int, name: str, below: str, width: float = _WIDTH
) -> None:
    colour = rank_colour(rank)
    ink = ink_on(colour)
    box(axis, x, y, width, _HEIGHT, colour)
    centre = x + width / 2
    write(axis, centre, y + 0.46, name, 10.5, color=ink, weight="bold")
    write(axis, centre, y + 0.2, below, 8, color=ink)


def _arrow(axis: Axes, start: float, end: float, y: float, rank: int) -> None:
    style = {"arrowstyle": "-|>", "color": rank_colour(rank), "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", (end, y), (start, y), arrowprops=style)
