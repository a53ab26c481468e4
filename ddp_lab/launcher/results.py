"""What a call on all ranks gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from ddp_lab.launcher.output import RankOutput


class Results(Sequence[Any]):
    """What each rank returned, by rank: `results[2]` is rank 2's.

    `output[rank].stdout` and `.stderr` hold what it printed. Tensors are copies: training in a
    rank does not change the notebook's model; return its `state_dict()` instead.
    """

    def __init__(self, values: Sequence[Any], output: Sequence[RankOutput]) -> None:
        self._values = list(values)
        self.output = list(output)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self._values[rank]

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Results | list):
            return self._values == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # compares by value

    def __repr__(self) -> str:
        lines = []
        for rank, value in enumerate(self._values):
            first, *rest = repr(value).splitlines() or [""]
            indent = " " * len(f"rank {rank}: ")
            lines += [f"rank {rank}: {first}", *(indent + line for line in rest)]
        return "\n".join(lines)

    def _ipython_display_(self) -> None:
        """A cell that ends in a launch shows what came back, and nothing when that is nothing."""
        if any(value is not None for value in self._values):
            from IPython.display import display

            display({"text/plain": repr(self)}, raw=True)
