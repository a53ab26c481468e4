"""The `ddp-lab` command.

What a command does lies in a module that is imported when the command runs, so that
`ddp-lab --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="ddp-lab",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Notebooks = Annotated[
    list[Path] | None,
    typer.Argument(metavar="NOTEBOOK", help="All lessons if there is none.", show_default=False),
]
Timeout = Annotated[int, typer.Option(min=1, help="Seconds that one cell may take.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddp-lab {version('ddp-lab')}")
        raise typer.Exit


@contextmanager
def _complaints() -> Iterator[None]:
    """Turn what is wrong with the arguments into a message and exit code 2."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        typer.echo(f"ddp-lab: {error}", err=True)
        raise typer.Exit(2) from None


@app.callback()
def ddp_lab(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A Jupyter course on PyTorch data parallelism, for one machine with or without GPUs."""


@app.command()
def doctor() -> None:
    """Say what this machine offers, and launch 2 ranks as a test.

    The exit code is 1 if that launch fails.
    """
    from ddp_lab.doctor import examine

    failed = False
    for finding in examine():
        typer.echo(str(finding))
        failed |= finding.fatal
    raise typer.Exit(int(failed))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: ddp-lab lab lessons/01_single_device.ipynb --no-browser --port 8890",
)
def lab(
    context: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A notebook or a folder; the first lesson if there is none."
        ),
    ] = None,
) -> None:
    """Open JupyterLab on the first lesson, or on PATH.

    It is started with limits on output that 100,000 printed lines do not reach. Options that are
    not listed here go to JupyterLab, as does everything after PATH or "--".
    """
    from ddp_lab.notebooks import open_lab

    with _complaints():
        code = open_lab([path, *context.args] if path else [])
    raise typer.Exit(code)


@app.command()
def validate(notebooks: Notebooks = None, timeout: Timeout = 300) -> None:
    """Run notebooks and compare each output with the stored one.

    The exit code is pytest's: 0 if every output is the same.
    """
    from ddp_lab.notebooks import validate

    with _complaints():
        code = validate(notebooks or [], timeout)
    raise typer.Exit(code)


@app.command()
def execute(notebooks: Notebooks = None, timeout: Timeout = 300) -> None:
    """Run notebooks and store them with their new outputs.

    A cell that is meant to fail needs the tag raises-exception. If another one fails, its notebook
    stays as it was and the exit code is 1.
    """
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    from ddp_lab.notebooks import execute, select

    with _complaints():
        chosen = select(notebooks or [])
    failed = 0
    for path in chosen:
        typer.echo(f"{path.name} ", nl=False)
        try:
            execute(path, timeout)
            typer.echo("stored")
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            typer.echo("failed, left as it was")
            print(error, file=sys.stderr)
    raise typer.Exit(int(failed > 0))


def main() -> None:
    """The console script."""
    app(prog_name="ddp-lab")
