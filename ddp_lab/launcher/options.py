"""What `launch` and `World` accept, checked before anything starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_RANKS = 256
BACKENDS = ("auto", "gloo", "nccl")
OUTPUTS = ("live", "by-rank", "quiet")


@dataclass(frozen=True)
class Options:
    """The shape of a job. Raises TypeError or ValueError, saying what to write instead."""

    nproc_per_node: int = 2
    nnodes: int = 1
    backend: str = "auto"
    threads: int | None = None
    timeout: float | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        _whole("nproc_per_node", self.nproc_per_node, example=4)
        _whole("nnodes", self.nnodes, example=2)
        if self.world_size > MAX_RANKS:
            raise ValueError(
                f"nnodes * nproc_per_node is {self.world_size}; at most {MAX_RANKS} ranks can be "
                "launched: write a smaller number"
            )
        if self.threads is not None:
            _whole("threads", self.threads, example=1)
        _choice("backend", self.backend, BACKENDS)
        if self.output is not None:
            _choice("output", self.output, OUTPUTS)
        _seconds("timeout", self.timeout)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def output_mode(self) -> str:
        """`output`, or else the environment's DDP_LAB_OUTPUT, or else live."""
        if self.output is not None:
            return self.output
        mode = os.environ.get("DDP_LAB_OUTPUT") or "live"
        _choice("the environment variable DDP_LAB_OUTPUT", mode, OUTPUTS)
        return mode


def check_function(fn: Any, args: tuple[Any, ...]) -> None:
    """Raise TypeError when `fn(*args)` cannot even be called."""
    if not callable(fn):
        raise TypeError(
            f"the first argument must be a function, but it is {fn!r} (a {type(fn).__name__}): "
            "write launch(train, 100), not launch(train(100))"
        )
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name} is an async function, which a rank would not wait for: write "
            f"launch(lambda: asyncio.run({name}(...)))"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins may have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name}{signature} cannot be called with {len(args)} argument(s): {error}. Ranks call "
            "it with the arguments given to launch and nothing else; a rank learns its number from "
            "dist.get_rank(). For keyword arguments use a lambda"
        ) from None


def _whole(name: str, value: Any, example: int) -> None:
    hint = f"write a whole number from 1 to {MAX_RANKS}, such as {name}={example}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} (a {type(value).__name__}): {hint}")
    if not 1 <= value <= MAX_RANKS:
        raise ValueError(f"{name} is {value}: {hint}")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    hint = "write one of " + ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r} (a {type(value).__name__}): {hint}")
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: {hint}")


def _seconds(name: str, value: Any) -> None:
    hint = f"write a number of seconds above 0, such as {name}=30, or None for no limit"
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} (a {type(value).__name__}): {hint}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}: {hint}")


Function = Callable[..., Any]
