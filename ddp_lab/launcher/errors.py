"""What a launch raises. The message leads with the cause and the learner's own line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp_lab.launcher.source import Line

if TYPE_CHECKING:
    from ddp_lab.launcher.output import RankOutput


@dataclass(frozen=True)
class RankReport:
    """What became of one rank in a call that failed. Text only: no frames, no tensors."""

    rank: int
    state: str
    """"returned", "raised", "died", "stuck" (it had to be stopped) or "idle" (it took no part)."""
    summary: str = ""
    """`raised ValueError: bad label`, `was killed by SIGSEGV`, `was in all_reduce`, ..."""
    lines: tuple[Line, ...] = ()
    """The learner's lines that led there, outermost first."""
    traceback: str = ""
    """The whole traceback, library frames included."""
    details: tuple[str, ...] = ()
    """What else is worth knowing: the library's function, the exception before."""
    consequence: bool = field(default=False, repr=False)
    """True when a peer's end explains it, such as "connection closed by peer"."""

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank} {self.summary}", *self.details_and_lines()])

    def details_and_lines(self) -> list[str]:
        return [f"  {line}" for line in (*_shortened(self.lines), *self.details)]


def _shortened(lines: Sequence[Line]) -> list[object]:
    """Runs of one line as Python shows them: three times, then how many more."""
    shown: list[object] = []
    for line, run in itertools.groupby(lines):
        count = len(list(run))
        shown += [line] * min(count, 3)
        if count > 3:
            shown.append(f"[the line above repeated {count - 3} more times]")
    if len(shown) > 40:  # functions that call one another
        shown[20:-20] = [f"[{len(shown) - 40} more lines]"]
    return shown


class LaunchError(RuntimeError):
    """A call on several ranks did not end well.

    `rank` is the rank that caused it (None where no single one did), `reports` has a RankReport
    for each rank, `results` what the ranks that returned returned (None for the others), and
    `output` what each rank printed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        reports: Sequence[RankReport] = (),
        results: Sequence[Any] = (),
        output: Sequence[RankOutput] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.reports = list(reports)
        self.results = list(results)
        self.output = list(output)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a traceback through the launcher."""
        return f"{type(self).__name__}: {self}".splitlines()


class RankFailedError(LaunchError):
    """A rank raised an exception, ended, or was killed."""


class LaunchTimeoutError(LaunchError):
    """The time limit passed before every rank had returned."""


def find_cause(failures: Sequence[RankReport]) -> RankReport:
    """The failure that the others follow from: the first that a peer's end does not explain.

    Among ranks that failed in the same way it is the lowest, so that the message does not depend
    on who was a moment faster.
    """
    own = [report for report in failures if not report.consequence] or list(failures)
    alike = [r for r in own if (r.summary, r.lines) == (own[0].summary, own[0].lines)]
    return min(alike, key=lambda report: report.rank)


def failure_message(world_size: int, cause: RankReport, reports: Iterable[RankReport]) -> str:
    """The message of a RankFailedError: the cause, its lines, then where the others were."""
    others = [report for report in reports if report.rank != cause.rank]
    head = f"rank {cause.rank} of {world_size} {cause.summary}"
    return "\n".join([head, *cause.details_and_lines(), *_grouped(others, cause)])


def timeout_message(seconds: float, reports: Sequence[RankReport]) -> str:
    """The message of a LaunchTimeoutError: where every rank was."""
    stuck = sum(report.state == "stuck" for report in reports)
    ranks = "1 rank" if stuck == 1 else f"{stuck} ranks"
    head = f"{ranks} of {len(reports)} had not returned after {seconds:g} s"
    stuck_first = sorted(reports, key=lambda report: report.state != "stuck")
    return "\n".join([head, *_grouped(stuck_first)])


def interruption(reports: Sequence[RankReport]) -> KeyboardInterrupt:
    """A KeyboardInterrupt that says where every rank was, and shows no frames of ours."""
    error = KeyboardInterrupt("\n".join(["the ranks were stopped", *_grouped(reports)]))
    # IPython shows what this returns.
    error._render_traceback_ = lambda: f"KeyboardInterrupt: {error}".splitlines()  # type: ignore[attr-defined]
    return error


def _grouped(reports: Iterable[RankReport], cause: RankReport | None = None) -> list[str]:
    """One entry for all ranks that share a fate, in the order of their lowest rank."""
    groups: dict[tuple[str, tuple[Line, ...]], list[int]] = {}
    for report in reports:
        if report.state == "idle":
            continue
        summary = report.summary
        if cause and (report.summary, report.lines) == (cause.summary, cause.lines):
            groups.setdefault(("did the same", ()), []).append(report.rank)
        else:
            # Of the others the innermost line is enough.
            groups.setdefault((summary, report.lines[-1:]), []).append(report.rank)
    entries = []
    for (summary, lines), ranks in groups.items():
        if len(ranks) > 1:
            summary = re.sub(r"^was ", "were ", summary).replace("lost its ", "lost their ")
        place = f" ({lines[0].place}:  {lines[0].text})" if lines else ""
        entries.append(f"  {name_ranks(ranks)} {summary}{place}")
    return entries


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2, 3`, `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
