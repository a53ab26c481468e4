"""`%%ranks`: a cell that runs on every rank of a World, with variables that stay."""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import sys
import tokenize
import warnings
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_lab.launcher.call import prepare
from ddp_lab.launcher.display import show_open_figures
from ddp_lab.launcher.errors import LaunchError
from ddp_lab.launcher.options import Options
from ddp_lab.launcher.source import Line, running_cell_label
from ddp_lab.launcher.world import World


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write ranks such as 0,2") from None


@magics_class
class RanksMagics(Magics):
    """Holds the World of one notebook."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        loaded_before = shell.magics_manager.registry.get(type(self).__name__)
        self.world: World | None = getattr(loaded_before, "world", None)

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
        """Run the cell on every rank; variables stay from cell to cell, and so do options.

        The last expression is shown for each rank. `%ranks` alone gives the World, for `put`,
        `get` and `run`. Another number of ranks, backend or number of threads starts them afresh,
        without variables.
        """
        arguments = parse_argstring(self.ranks, line)
        if arguments.shutdown:
            self._end()
            return None
        options = self._options(arguments)  # whatever is wrong is found before anything changes
        if cell is None:
            return self._world(options)
        picked = _picked(arguments.ranks, options.world_size)
        label, text = running_cell_label(), f"%%ranks {line}\n{cell}"
        _check_syntax(cell, label)
        call = prepare(run_cell, (cell, label))
        call.sources[label] = text
        self._world(options)._call(call, picked)
        return None

    def _options(self, arguments: argparse.Namespace) -> Options:
        """What the arguments ask for, on top of what the World has."""
        names = ("nproc_per_node", "nnodes", "backend", "threads", "timeout", "output")
        asked = {name: getattr(arguments, name) for name in names}
        kept = vars(self.world.options) if self.world is not None else {}
        return Options(**{**kept, **{k: v for k, v in asked.items() if v is not None}})

    def _world(self, options: Options) -> World:
        """The World that runs, if it has the shape that the options ask for, else a new one."""
        if self.world is None or self.world.closed or _shape(self.world.options) != _shape(options):
            self._end()
            self.world = World(**vars(options))
        self.world.options = options
        return self.world

    def _end(self) -> None:
        if self.world is not None:
            self.world.shutdown()
            self.world = None


def _shape(options: Options) -> tuple[Any, ...]:
    """What cannot change while ranks run; the rest holds from one cell to the next."""
    return options.nproc_per_node, options.nnodes, options.backend, options.threads


def _picked(picked: list[int] | None, world_size: int) -> list[int] | None:
    for rank in picked or []:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"there is no rank {rank} among {world_size}: write ranks from 0 to "
                f"{world_size - 1}, such as -r 0"
            )
    return picked


class CellSyntaxError(LaunchError):
    """The cell is not Python. Not a SyntaxError, for which IPython would show frames of ours."""

    def _render_traceback_(self) -> list[str]:
        return f"SyntaxError: {self}".splitlines()


def _check_syntax(cell: str, label: str) -> None:
    """Raise a CellSyntaxError here, once, rather than on every rank."""
    try:
        compile(_parse(cell, label), label, "exec", dont_inherit=True)
    except SyntaxError as error:
        number = error.lineno or 1
        text = ["", *cell.splitlines()][number - 1 : number]
        message = f"{error.msg}\n  {Line(label, number, '<module>', ''.join(text).strip())}"
    else:
        return
    raise CellSyntaxError(message)


def _parse(cell: str, label: str) -> ast.Module:
    return ast.parse("\n" + cell, label)  # the magic's own line comes first


def _is_quiet(cell: str) -> bool:
    """Does a semicolon end the cell, so that its last value is not shown?"""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(cell).readline)
    texts = [token.string for token in tokens if token.type not in skipped]
    return texts[-1:] == [";"]


def run_cell(cell: str, label: str) -> None:
    """Run in a rank: the cell in its namespace, then the last expression shown."""
    namespace = sys.modules["__main__"].__dict__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the notebook has shown it
        tree = _parse(cell, label)
        last: Any = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _is_quiet(cell):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        program = compile(tree, label, "exec", dont_inherit=True)
        expression = last and compile(last, label, "eval", dont_inherit=True)
    exec(program, namespace)
    value = eval(expression, namespace) if expression is not None else None
    if value is not None:
        namespace["_"] = value
        builtins.display(value)  # type: ignore[attr-defined]
    show_open_figures()
