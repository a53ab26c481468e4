"""`%%ranks`: a cell that runs on every rank of a World, with variables that stay."""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_lab.launcher.display import show_open_figures
from ddp_lab.launcher.options import Options
from ddp_lab.launcher.source import running_cell_label
from ddp_lab.launcher.world import World, prepare


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write ranks such as 0,2") from None


@magics_class
class RanksMagics(Magics):
    """Holds the World of one notebook."""

    world: World | None = None

    @magic_arguments()
    @argument("-n", "--nproc-per-node", type=int, help="ranks a node; starts or resizes the world")
    @argument("--nnodes", type=int, help="simulated nodes")
    @argument("-b", "--backend", help="gloo, nccl or auto")
    @argument("--threads", type=int, help="CPU threads of each rank")
    @argument("-t", "--timeout", type=float, help="seconds that a cell may take")
    @argument("-o", "--output", help="live, by-rank or quiet")
    @argument("-r", "--ranks", type=_ranks, help="run this cell on these ranks only, such as 0,2")
    @argument("--shutdown", action="store_true", help="end the ranks")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> World | None:
        """Run the cell on every rank; variables stay from cell to cell.

        The last expression is shown for each rank. `%ranks` alone gives the World, for `put`,
        `get` and `run`.
        """
        arguments = parse_argstring(self.ranks, line)
        if arguments.shutdown:
            self._end()
            return None
        world = self._world(arguments)
        if cell is None:
            return world
        picked = self._picked(world, arguments.ranks)
        label, text = running_cell_label(), f"%%ranks {line}\n{cell}"
        _check_syntax(cell, label)
        call = prepare(run_cell, (cell, label))
        call.sources[label] = text
        world._call(call, picked)
        return None

    def _world(self, arguments: argparse.Namespace) -> World:
        """The World that the arguments ask for: the one that runs, if they don't differ."""
        names = ("nproc_per_node", "nnodes", "backend", "threads", "timeout", "output")
        asked = {name: getattr(arguments, name) for name in names}
        kept = vars(self.world.options) if self.world is not None else {}
        options = Options(**{**kept, **{k: v for k, v in asked.items() if v is not None}})
        if self.world is None or self.world.options != options:
            self._end()
            self.world = World(**vars(options))
        return self.world

    def _end(self) -> None:
        if self.world is not None:
            self.world.shutdown()
            self.world = None

    @staticmethod
    def _picked(world: World, picked: list[int] | None) -> list[int] | None:
        for rank in picked or []:
            if not 0 <= rank < world.world_size:
                raise ValueError(
                    f"there is no rank {rank} among {world.world_size}: write ranks from 0 to "
                    f"{world.world_size - 1}"
                )
        return picked


def _check_syntax(cell: str, label: str) -> None:
    """Raise a SyntaxError here, once, rather than on every rank."""
    try:
        _parse(cell, label)
    except SyntaxError as error:
        shown = f"{label}, line {error.lineno}:  {(error.text or '').strip()}"
        lines = [f"SyntaxError: {error.msg}", f"  {shown}"]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise


def _parse(cell: str, label: str) -> ast.Module:
    return ast.parse("\n" + cell, label)  # the magic's own line comes first


def run_cell(cell: str, label: str) -> None:
    """Run in a rank: the cell in its namespace, then the last expression shown."""
    namespace = sys.modules["__main__"].__dict__
    tree = _parse(cell, label)
    last: Any = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, label, "exec"), namespace)
    value = eval(compile(last, label, "eval"), namespace) if last is not None else None
    if value is not None:
        namespace["_"] = value
        builtins.display(value)  # type: ignore[attr-defined]
    show_open_figures()
