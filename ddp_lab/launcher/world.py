"""Ranks that stay: `World`, and `launch`, which is a World used once."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ddp_lab.launcher import client, rank, travel
from ddp_lab.launcher.channel import Channel, ChannelClosed
from ddp_lab.launcher.errors import (
    LaunchError,
    LaunchTimeoutError,
    RankFailedError,
    RankReport,
    failure_message,
    timeout_message,
)
from ddp_lab.launcher.options import Function, Options, check_function
from ddp_lab.launcher.output import Output, RankOutput
from ddp_lab.launcher.results import Results
from ddp_lab.launcher.source import line_at, remember_source
from ddp_lab.launcher.supervisor import Job
from ddp_lab.launcher.travel import Parcel

_PATIENCE = 0.5  # s to wait for a template that is warming up before saying so
_HARD_STOP = 3.0  # s after an interrupt until the job is given up


def launch(
    fn: Function,
    *args: Any,
    nproc_per_node: int = 2,
    nnodes: int = 1,
    backend: str = "auto",
    threads: int | None = None,
    timeout: float | None = None,
    output: str | None = None,
) -> Results:
    """Run `fn(*args)` on `nnodes * nproc_per_node` ranks; what each rank returned.

    fn may be defined in a notebook cell; for keyword arguments use a lambda. In a rank the default
    process group is initialised, and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
    MASTER_ADDR and MASTER_PORT are set as torchrun sets them. fn and args reach the ranks as
    copies, and so do results.

    nproc_per_node, nnodes: ranks a (simulated) node, and nodes; at most 256 ranks in all.
    backend: "gloo", "nccl", or "auto": NCCL when there is a GPU for each rank, else gloo.
    threads: CPU threads of each rank; None gives each its share of the cores.
    timeout: seconds until LaunchTimeoutError; None for no limit.
    output: "live", "by-rank" or "quiet"; None takes the environment's DDP_LAB_OUTPUT, else "live".

    Raises RankFailedError when a rank fails, TypeError and ValueError for arguments that cannot
    work, before anything starts. Called by the notebook, not by ranks.
    """
    options = Options(nproc_per_node, nnodes, backend, threads, timeout, output)
    call = prepare(fn, args)
    with _HoldInterrupts(), World._of(options) as world:  # none hits between call and shutdown
        world._keeps_variables = False
        results = world._call(call)
        results.output = list(map(operator.add, results.output, world._end()))
        return results


class World:
    """Ranks that keep their variables from one call to the next.

        with World(nproc_per_node=4) as world:
            world.put(steps=100)
            losses = world.run(train)
            models = world.get("model")

    A function runs in its rank's namespace: what it declares `global` stays, and what it reads
    from there, `put` may have placed. The ranks start at the first call. When a call fails, the
    World goes on if all ranks have ended the call and agree on their collectives; else it starts
    afresh at the next call, and the error says that variables were lost.

    Arguments are those of `launch`.
    """

    def __init__(
        self,
        nproc_per_node: int = 2,
        nnodes: int = 1,
        backend: str = "auto",
        threads: int | None = None,
        timeout: float | None = None,
        output: str | None = None,
    ) -> None:
        self._set(Options(nproc_per_node, nnodes, backend, threads, timeout, output))

    @classmethod
    def _of(cls, options: Options) -> World:
        world = cls.__new__(cls)
        world._set(options)
        return world

    def _set(self, options: Options) -> None:
        _refuse_nested()
        self.options = options
        self._link: _Link | None = None
        self._busy = threading.Lock()
        self._closed = False
        self._mode = "live"  # of the last call
        self._keeps_variables = True  # worth a word when they are lost

    @property
    def world_size(self) -> int:
        return self.options.world_size

    @property
    def closed(self) -> bool:
        """Has it been shut down?"""
        return self._closed

    def __repr__(self) -> str:
        size = self.world_size
        nodes = f" on {self.options.nnodes} simulated nodes" if self.options.nnodes > 1 else ""
        if self._closed:
            state = "shut down"
        elif self._link is None or not self._link.facts:
            state = "not started"
        else:
            backend, threads = self._link.facts["backend"], self._link.facts["threads"]
            device = "GPU" if backend == "nccl" else "CPU"
            state = f"{backend}, {device}, {threads} thread{'s' * (threads > 1)} a rank"
        return f"World({size} rank{'s' * (size > 1)}{nodes}: {state})"

    def run(self, fn: Function, *args: Any) -> Results:
        """Run `fn(*args)` on every rank; what each returned. Raises as `launch` does."""
        return self._call(prepare(fn, args))

    def put(self, **names: Any) -> None:
        """Set variables in the namespace of every rank; each gets a copy of its own."""
        self._call(prepare(_update_namespace, (names,)))

    def get(self, name: str) -> list[Any]:
        """The variable of that name, of every rank, in order.

        Raises RankFailedError with a NameError when a rank has none.
        """
        return list(self._call(prepare(_read_namespace, (name,))))

    def shutdown(self) -> None:
        """End the ranks. Further calls raise LaunchError; calling this twice does no harm."""
        self._end()

    def _end(self) -> list[RankOutput]:
        """End the ranks; what they printed since the last call, in exit handlers for example."""
        with self._busy, _HoldInterrupts() as hold:
            self._closed = True
            self._forget_foreign_link()
            link, self._link = self._link, None
            output = Output(self.world_size, self._mode)
            if link is not None:
                link.leave(hold, output)
            return output.finish()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _call(self, call: _Call, picked: Sequence[int] | None = None) -> Results:
        """Run a call on the picked ranks, on all by default."""
        try:
            self._mode = mode = self.options.output_mode
            with self._busy, _HoldInterrupts() as hold:
                if self._closed:
                    raise LaunchError("this World has been shut down: make a new one")
                self._forget_foreign_link()
                if self._link is None:
                    self._link = _Link(self.options)
                conversation = _Conversation(self._link, self.options, mode, hold)
                try:
                    return conversation.hold(call, picked)
                except (LaunchError, KeyboardInterrupt) as error:
                    if self._keeps_variables and not self._link.open:
                        error.args = (f"{error}\n  {_LOST}".lstrip(),)
                    raise
                finally:
                    if not self._link.open:
                        self._link.close()
                        self._link = None
        finally:
            call.parcel.close()

    def _forget_foreign_link(self) -> None:
        """A fork of the notebook's process leaves the ranks to the notebook and starts its own."""
        if self._link is not None and self._link.owner != os.getpid():
            self._link = None


class _Call:
    """A function and its arguments, ready to travel."""

    def __init__(self, parcel: Parcel, sources: dict[str, str]) -> None:
        self.parcel = parcel
        self.sources = sources


def prepare(fn: Function, args: tuple[Any, ...]) -> _Call:
    """Check and pickle a call. Raises TypeError, naming what cannot be sent to other processes."""
    _refuse_nested()
    check_function(fn, args)
    try:
        return _Call(*travel.pack((fn, args), travel.CallPickler))
    except MemoryError:
        raise
    except Exception as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        guilty = travel.culprit(fn, args) or f"something that {name} uses"
        message = (
            f"{name} cannot be sent to the ranks, since {guilty} cannot be pickled ({error}): "
            "create it inside the function, so that each rank makes its own"
        )
    raise TypeError(message)


def _refuse_nested() -> None:
    if rank.current is not None:
        raise LaunchError(
            "launch and World were called inside a rank, which cannot start ranks itself: call "
            "them from the notebook"
        )


class _Link:
    """A running job, as the kernel sees it."""

    def __init__(self, options: Options) -> None:
        self.owner = os.getpid()
        self.temporary = os.path.join(tempfile.gettempdir(), f"ddp-lab-{secrets.token_hex(4)}")
        job = Job(
            options, dict(os.environ), os.getcwd(), list(sys.path), self.owner, self.temporary
        )
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

    def leave(self, hold: _HoldInterrupts, output: Output) -> None:
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


class _Conversation:
    """One call, from the request to its end."""

    def __init__(self, link: _Link, options: Options, mode: str, hold: _HoldInterrupts) -> None:
        self.link = link
        self.options = options
        self.output = Output(options.world_size, mode)
        self.interrupts = hold
        self.values: dict[int, Parcel] = {}
        self.ending: tuple[Any, ...] | None = None
        self.last_words = ""

    def hold(self, call: _Call, picked: Sequence[int] | None) -> Results:
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
        if outcome == "interrupted" or self.interrupts.consume():
            self._discard()
            raise KeyboardInterrupt
        values, lost = self._values()
        failures = [*failures, *lost]
        if outcome == "returned" and not lost:
            return Results(values, output)
        reports = self._reports(ranks, failures, stuck, outcome)
        error: LaunchError
        if outcome == "timeout":
            assert self.options.timeout is not None
            worst = next(report for report in reports if report.state == "stuck")
            error = LaunchTimeoutError(
                timeout_message(self.options.timeout, reports),
                rank=worst.rank,
                reports=reports,
                results=values,
                output=output,
            )
        else:
            cause = find_cause(failures)
            cause = reports[cause.rank]
            error = RankFailedError(
                failure_message(size, cause, reports),
                rank=cause.rank,
                reports=reports,
                results=values,
                output=output,
            )
        raise error

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
            except Exception as error:
                failures.append(rank.describe_lost_result(number, error))
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
            if outcome == "timeout" or known[report.rank].state != "died":
                known[report.rank] = report
        return [_with_text(known[number]) for number in sorted(known)]


_LOST = "the World starts afresh at its next call: its variables are lost"


def find_cause(failures: Sequence[RankReport]) -> RankReport:
    """The failure that the others follow from: the first that a peer's end does not explain.

    Among ranks that failed in the same way it is the lowest, so that the message does not depend
    on who was a moment faster.
    """
    own = [report for report in failures if not report.consequence] or list(failures)
    alike = [r for r in own if (r.summary, r.lines) == (own[0].summary, own[0].lines)]
    return min(alike, key=lambda report: report.rank)


def _with_text(report: RankReport) -> RankReport:
    """The supervisor knows places only; the source text is here."""
    from dataclasses import replace

    lines = tuple(
        line if line.text else line_at(line.file, line.number, line.function)
        for line in report.lines
    )
    return replace(report, lines=lines)


class _HoldInterrupts:
    """Turns the main thread's SIGINT into a flag while ranks run, so that nothing is torn.

    The flag raises KeyboardInterrupt at the end, unless somebody has consumed it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._taken = 0
        self._previous: Any = None
        self._holds = threading.current_thread() is threading.main_thread()
        self._wake, self._woken = os.pipe() if self._holds else (-1, -1)

    def __enter__(self) -> _HoldInterrupts:
        if self._holds:
            os.set_blocking(self._woken, False)
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._previous)
            os.close(self._wake)
            os.close(self._woken)
        if self.count and kind is None:
            raise KeyboardInterrupt

    @property
    def interrupted(self) -> bool:
        return self.count > 0

    def take(self) -> bool:
        """One interrupt that has not been taken yet?"""
        if self._taken < self.count:
            self._taken += 1
            return True
        return False

    def consume(self) -> bool:
        """Was there any? It will not be raised at the end any more."""
        was, self.count = self.count > 0, 0
        return was

    def wait(self, channel: Channel, seconds: float | None) -> None:
        """Wait for something to arrive, an interrupt, or the end of the time."""
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        if self._holds:
            poller.register(self._wake, select.POLLIN)
        poller.poll(None if seconds is None else seconds * 1000)
        if self._holds:
            with contextlib.suppress(BlockingIOError):
                os.set_blocking(self._wake, False)
                os.read(self._wake, 64)

    def _note(self, *_: Any) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"!")


def _update_namespace(names: dict[str, Any]) -> None:
    sys.modules["__main__"].__dict__.update(names)


def _read_namespace(name: str) -> Any:
    namespace = sys.modules["__main__"].__dict__
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined in this rank")
    return namespace[name]
