"""What the kernel and a job's supervisor say to each other, from the kernel's side."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddp_lab.launcher import client, travel
from ddp_lab.launcher.call import Call
from ddp_lab.launcher.channel import ChannelClosed
from ddp_lab.launcher.errors import (
    LaunchError,
    LaunchTimeoutError,
    RankFailedError,
    RankReport,
    failure_message,
    find_cause,
    interruption,
    timeout_message,
)
from ddp_lab.launcher.interrupts import HoldInterrupts
from ddp_lab.launcher.options import Options
from ddp_lab.launcher.output import Output, RankOutput
from ddp_lab.launcher.reports import describe_lost_result
from ddp_lab.launcher.results import Results
from ddp_lab.launcher.source import line_at, remember_source
from ddp_lab.launcher.supervisor import Job
from ddp_lab.launcher.travel import Parcel

_PATIENCE = 0.5  # s to wait for a template that is warming up before saying so
_HARD_STOP = 3.0  # s after an interrupt until the job is given up


class Link:
    """A running job, as the kernel sees it."""

    def __init__(self, options: Options) -> None:
        self.owner = os.getpid()
        self.temporary = os.path.join(tempfile.gettempdir(), f"ddp-lab-{secrets.token_hex(4)}")
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            raise LaunchError(
                "the notebook's folder does not exist any more: change to another with os.chdir"
            ) from None
        job = Job(options, dict(os.environ), directory, list(sys.path), self.owner, self.temporary)
        self.channel, self.template = client.start_job(job)
        self.facts: dict[str, Any] = {}
        self.calls = 0
        self.open = True
        # An abandoned World ends with its last reference: its supervisor sees the socket close.
        self._finalizer = weakref.finalize(self, self.channel.close)

    def close(self) -> None:
        self.open = False
        self._finalizer()
        if os.path.exists(self.temporary):  # the supervisor was killed
            shutil.rmtree(self.temporary, ignore_errors=True)

    def leave(self, hold: HoldInterrupts, output: Output) -> None:
        """Let the ranks end, and wait until nothing is left of them."""
        try:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(("close",))
            while not (hold.interrupted or self.channel.closed):
                hold.wait(self.channel, output.flush_due())
                for message, descriptors in self.channel.receive_available():
                    output.take(message)
                    for descriptor in descriptors:  # of nobody's interest any more
                        os.close(descriptor)
                if output.flush_due() == 0.0:
                    output.flush()
        finally:
            self.close()


class Conversation:
    """One call, from the request to its end."""

    def __init__(self, link: Link, options: Options, mode: str, hold: HoldInterrupts) -> None:
        self.link = link
        self.options = options
        self.output = Output(options.world_size, mode)
        self.interrupts = hold
        self.values: dict[int, Parcel] = {}
        self.ending: tuple[Any, ...] | None = None
        self.last_words = ""

    def hold(self, call: Call, picked: Sequence[int] | None) -> Results:
        link, size = self.link, self.options.world_size
        ranks = list(range(size)) if picked is None else list(picked)
        link.calls += 1
        for label, text in call.sources.items():
            remember_source(label, text)
        with contextlib.suppress(ChannelClosed):
            share = call.parcel.share()
            message = ("call", share, call.sources, ranks, self.options.timeout)
            link.channel.send(message, share.descriptors)
        try:
            self._listen()
            output = self.output.finish()
        except BaseException:  # the cell cannot be written to: the call is lost
            link.open = False
            raise
        if self.ending is None:
            return self._raise_without_ending()
        _, outcome, goes_on, failures, stuck = self.ending
        link.open = goes_on
        if not goes_on:
            self._wait_for_close()
        if self.interrupts.consume() or outcome == "interrupted":
            self._discard()
            raise interruption(self._reports(ranks, failures, stuck, "interrupted"))
        values, lost = self._values()
        if outcome == "returned" and not lost:
            return Results(values, output)
        reports = self._reports(ranks, [*failures, *lost], stuck, outcome)
        if outcome == "timeout":
            raise self._timeout(reports, values, output)
        cause = find_cause([*failures, *lost]).rank
        raise RankFailedError(
            failure_message(size, reports[cause], reports),
            rank=cause,
            reports=reports,
            results=values,
            output=output,
        )

    def _timeout(
        self, reports: list[RankReport], values: list[Any], output: list[RankOutput]
    ) -> LaunchTimeoutError:
        assert self.options.timeout is not None
        return LaunchTimeoutError(
            timeout_message(self.options.timeout, reports),
            rank=next(report.rank for report in reports if report.state == "stuck"),
            reports=reports,
            results=values,
            output=output,
        )

    def _listen(self) -> None:
        """Take in what arrives until the call has ended, showing output meanwhile."""
        channel, output = self.link.channel, self.output
        began, notified = time.monotonic(), False
        interrupted_at: float | None = None
        while self.ending is None and not channel.closed:
            due = output.flush_due()
            if not self.link.facts and not notified:
                due = 0.1 if due is None else min(due, 0.1)
                if time.monotonic() - began > _PATIENCE:
                    notified = True
                    self._say_that_it_warms_up()
            if self.interrupts.take():
                if not self._started:
                    return
                interrupted_at = interrupted_at or time.monotonic()
                with contextlib.suppress(ChannelClosed):
                    channel.send(("interrupt", self.link.calls))
            if interrupted_at and time.monotonic() - interrupted_at > _HARD_STOP:
                return
            if interrupted_at:
                due = 0.1 if due is None else min(due, 0.1)
            self.interrupts.wait(channel, due)
            for message, descriptors in channel.receive_available():
                self._take(message, descriptors)
            if output.flush_due() == 0.0:
                output.flush()

    @property
    def _started(self) -> bool:
        """Has a supervisor been started, or will it be at once?"""
        template = self.link.template
        return bool(self.link.facts) or template is None or template.ready

    def _take(self, message: tuple[Any, ...], descriptors: list[int]) -> None:
        kind = message[0]
        if self.output.take(message):
            return
        if kind == "result":
            _, number, parcel = message
            parcel.descriptor = descriptors[0] if descriptors else None
            self.values[number] = parcel
        elif kind == "started":
            self.link.facts = message[1]
        elif kind == "refused":
            self.link.open = False
            raise ValueError(message[1])
        elif kind == "broken":
            self.last_words = message[1]
        elif kind == "ended":
            self.ending = message

    def _say_that_it_warms_up(self) -> None:
        template = self.link.template
        if self.output.mode == "live" and template is not None and not template.ready:
            print("ddp-lab is warming up: the first launch waits for torch to be imported")
            sys.stdout.flush()

    def _wait_for_close(self) -> None:
        """The job is over: wait until its supervisor has cleared everything away."""
        channel = self.link.channel
        deadline = time.monotonic() + _HARD_STOP
        while not channel.closed and time.monotonic() < deadline:
            self.interrupts.wait(channel, 0.1)
            channel.receive_available()

    def _raise_without_ending(self) -> Results:
        """The supervisor has gone, or was given up."""
        self.link.open = False
        self._discard()
        if self.interrupts.consume():
            raise KeyboardInterrupt
        template = self.link.template
        words = self.last_words
        if not words and template is not None and template.has_ended():
            words = f"the template process ended: {template.last_words()}"
        raise LaunchError(words or "the supervisor of the ranks was killed")

    def _values(self) -> tuple[list[Any], list[RankReport]]:
        """What each rank returned, and a report for each whose value cannot be rebuilt here."""
        values: list[Any] = [None] * self.options.world_size
        failures = []
        for number, parcel in self.values.items():
            try:
                values[number] = travel.unpack(parcel)
            except (Exception, SystemExit) as error:
                failures.append(describe_lost_result(number, error))
        return values, failures

    def _discard(self) -> None:
        for parcel in self.values.values():
            parcel.close()

    def _reports(
        self,
        ranks: Sequence[int],
        failures: Sequence[RankReport],
        stuck: Sequence[RankReport],
        outcome: str,
    ) -> list[RankReport]:
        """What became of each rank, with the text of its lines."""
        known = {number: RankReport(number, "idle") for number in range(self.options.world_size)}
        known |= {number: RankReport(number, "stuck", "was running") for number in ranks}
        known |= {number: RankReport(number, "returned", "had returned") for number in self.values}
        known |= {report.rank: report for report in reversed(failures)}
        for report in stuck:  # where it was counts more than that it was then interrupted
            if outcome != "failed" or known[report.rank].state != "died":
                known[report.rank] = report
        return [_with_text(known[number]) for number in sorted(known)]


def _with_text(report: RankReport) -> RankReport:
    """The supervisor knows places only; the source text is here."""
    lines = tuple(
        line if line.text else line_at(line.file, line.number, line.function)
        for line in report.lines
    )
    return replace(report, lines=lines)
