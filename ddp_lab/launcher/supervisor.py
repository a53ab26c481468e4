"""One supervisor a job: it starts the ranks, relays what they say, and leaves nothing behind.

It is a process of its own, single-threaded while it forks, between the notebook's kernel and the
ranks. Whatever ends it (the kernel's death, the end of the job, an error) ends everything below.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from ddp_lab.launcher import processes, rank
from ddp_lab.launcher.backend import Refused, choose_backend
from ddp_lab.launcher.channel import Channel, ChannelClosed
from ddp_lab.launcher.errors import RankReport
from ddp_lab.launcher.limits import usable_cores
from ddp_lab.launcher.options import Options
from ddp_lab.launcher.rank_process import RankProcess, start_rank
from ddp_lab.launcher.rendezvous import serve_store
from ddp_lab.launcher.reports import death_report, stuck_report
from ddp_lab.launcher.travel import Parcel

GRACE = 0.5  # s: for ranks to end a call by themselves once another has failed
STOP_GRACE = 0.2  # s: between SIGTERM and SIGKILL
LEAVE_GRACE = 2.0  # s: for a rank's exit handlers
_STACK_GRACE = 0.3  # s: for a rank to write its stack
_JANITOR_GRACE = 3.0  # s: torch's shared-memory manager ends 2 s after those that it served
_READ = 1 << 16
_BACKLOG = 1 << 22  # bytes waiting for the kernel beyond which ranks must wait to print


@dataclass(frozen=True)
class Job:
    """What the kernel asks a supervisor to start."""

    options: Options
    environment: dict[str, str]
    directory: str
    path: list[str]
    kernel: int  # process id
    temporary: str  # a folder that the job makes, and that goes when it ends


class KernelGone(Exception):
    """The notebook's kernel has died or closed the job."""


class Supervisor:
    def __init__(self, kernel: Channel, job: Job, forks: bool) -> None:
        self.kernel = kernel
        self.job = job
        self.forks = forks
        self.ranks: list[RankProcess] = []
        self.requests: list[tuple[tuple[Any, ...], list[int]]] = []
        self.calls = 0
        self.interrupts: list[int] = []  # the number of the call that each was meant for
        self.failures: list[RankReport] = []  # of the current call, in order of arrival
        self.memory_kills = processes.memory_kills()
        self.selector = selectors.DefaultSelector()
        self.paused = False
        self.stopping = False  # deaths are our own doing now

    def main(self) -> None:
        """Run the job to its end."""
        processes.name_process("ddp-lab job")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.adopt_orphans()
        self.selector.register(self.kernel, selectors.EVENT_READ, self._read_kernel)
        try:
            for pid in {self.job.kernel, os.getppid()}:
                watch = processes.watch_process(pid)
                if watch is not None:
                    self.selector.register(watch, selectors.EVENT_READ, self._kernel_died)
                elif self.forks and pid == os.getppid():
                    processes.die_with_parent(pid)
            self._start()
            self._read_kernel()  # what came along with the job
            self._serve()
        except Refused as refusal:
            self.kernel.post(("refused", str(refusal)))
        except KernelGone:
            return  # nobody reads what is still to be sent
        except (OSError, RuntimeError) as error:
            advice = "launch fewer ranks, or raise its limits (ulimit -n, ulimit -u)"
            self.kernel.post(("broken", f"the system refused to start ranks ({error}): {advice}"))
        finally:
            processes.kill_descendants(kill_janitors=False)
            shutil.rmtree(self.job.temporary, ignore_errors=True)
            with contextlib.suppress(ChannelClosed):
                self.kernel.drain()
            self.kernel.close()  # which says that nothing is left
            processes.kill_descendants(_JANITOR_GRACE)

    # Starting

    def _start(self) -> None:
        options = self.job.options
        backend = choose_backend(options, self.job.environment)
        threads = options.threads or max(1, int(usable_cores() // options.world_size))
        _raise_descriptor_limit()
        os.mkdir(self.job.temporary, 0o700)
        self.meeting = processes.anonymous_file("ddp-lab-store")
        listener = socket.create_server(("127.0.0.1", 0), backlog=options.world_size)
        for number in range(options.world_size):
            seat = rank.Seat(
                rank=number,
                nproc_per_node=options.nproc_per_node,
                nnodes=options.nnodes,
                backend=backend,
                threads=threads,
                environment=self.job.environment,
                directory=self.job.directory,
                path=self.job.path,
                master_port=listener.getsockname()[1],
                store=self._meeting_path(),
                temporary=self.job.temporary,
            )
            self._add_rank(seat)
        self.kernel.post(("started", {"backend": backend, "threads": threads}))
        self.store = serve_store(listener, options.world_size)

    def _meeting_path(self) -> str:
        """The path of a file that all ranks inherit; it has no other name where /proc exists."""
        if processes.LINUX:
            return f"/proc/self/fd/{self.meeting}"
        return os.path.join(self.job.temporary, "store")

    def _add_rank(self, seat: rank.Seat) -> None:
        member = start_rank(seat, self.meeting, self.forks)
        self.ranks.append(member)
        self.selector.register(
            member.channel, selectors.EVENT_READ, lambda: self._read_rank(member)
        )
        if member.watch is not None:
            self.selector.register(
                member.watch, selectors.EVENT_READ, lambda: self._check_alive(member)
            )
        self._register_pipes([member])

    # Serving

    def _serve(self) -> None:
        while True:
            self._pump(lambda: bool(self.requests))
            message, descriptors = self.requests.pop(0)
            if message[0] == "call":
                _, parcel, sources, picked, timeout = message
                parcel.descriptor = descriptors[0] if descriptors else None
                if not self._call(parcel, sources, picked, timeout):
                    return
            elif message[0] == "close":
                self._leave()
                return

    def _call(
        self, parcel: Parcel, sources: dict[str, str], picked: list[int], timeout: float | None
    ) -> bool:
        """Run one call on the picked ranks; False when the job cannot go on after it."""
        self.calls += 1
        self.failures = [r.report for r in self.ranks if r.report]  # died since the last call
        states = [r.group for r in self.ranks]
        rejoin = f"call-{self.calls}" if any(state is None for state in states) else None
        busy = [r for r in self.ranks if (r.number in picked or rejoin) and r.alive]
        for member in busy:
            member.answered = False
            share = parcel.share() if member.number in picked else None  # else only to rejoin
            descriptors = share.descriptors if share else []
            member.channel.post(("call", share, sources, rejoin), descriptors)
        parcel.close()

        def settled() -> bool:
            return all(member.answered for member in busy)

        def interrupts() -> int:
            return self.interrupts.count(self.calls)

        self._pump(lambda: settled() or bool(self.failures) or interrupts() > 0, timeout)
        if interrupts():
            outcome = "interrupted"
        elif self.failures:
            outcome = "failed"
        elif settled():
            outcome = "returned"
        else:
            outcome = "timeout"
        stuck: list[RankReport] = []
        if not settled():
            if outcome != "failed":  # a failure's companions may end by themselves first
                stuck = self._stacks(busy)
                for member in busy:
                    if not member.answered:
                        processes.send_signal(member.pid, signal.SIGINT)
            self._pump(lambda: settled() or interrupts() > 1, GRACE)
            if not settled() and outcome == "failed":
                stuck = self._stacks(busy)
        goes_on = settled() and self._agree()
        if not goes_on:
            self._stop()
        self.kernel.post(("ended", outcome, goes_on, self.failures, stuck))
        for member in self.ranks:
            member.report = None
        return goes_on

    def _agree(self) -> bool:
        """All ranks live, and no two disagree on how many collectives a group has issued."""
        if not all(member.alive for member in self.ranks):
            return False
        counts: dict[str, int] = {}
        for member in self.ranks:
            for name, count in (member.group or {}).items():
                if counts.setdefault(name, count) != count:
                    return False
        return True

    def _stacks(self, members: Iterable[RankProcess]) -> list[RankReport]:
        """Where each rank that has not answered is, by its main thread's stack."""
        asked = [member for member in members if member.alive and not member.answered]
        before = {member.number: os.fstat(member.dump).st_size for member in asked}
        for member in asked:
            processes.send_signal(member.pid, rank.STACK_SIGNAL)

        def text(member: RankProcess) -> str:
            return os.pread(member.dump, 1 << 20, before[member.number]).decode(errors="replace")

        def complete() -> bool:
            return all(text(member).endswith("in <module>\n") for member in asked)

        deadline = time.monotonic() + _STACK_GRACE
        while not complete() and time.monotonic() < deadline:
            self._pump(lambda: False, 0.005)
        return [stuck_report(member.number, text(member)) for member in asked]

    def _stop(self) -> None:
        """End every rank: SIGTERM, a moment, SIGKILL to all that is left below us."""
        self.stopping = True
        for member in self.ranks:
            processes.send_signal(member.pid, signal.SIGTERM)
        self._pump(lambda: not any(member.alive for member in self.ranks), STOP_GRACE)
        self._clear()

    def _leave(self) -> None:
        """Let every rank end by itself, then see to it."""
        self.stopping = True
        for member in self.ranks:
            member.channel.post(("leave",))
        self._pump(lambda: not any(member.alive for member in self.ranks), LEAVE_GRACE)
        self._clear()

    def _clear(self) -> None:
        processes.kill_descendants(kill_janitors=False)
        for member in self.ranks:
            member.alive = False
            self._drain(member)

    # Events

    def _pump(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        """Handle events until `done()` or until the time is up."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if any(member.watch is None for member in self.ranks):  # no pidfd: look now and then
                left = 0.02 if left is None else min(left, 0.02)
            if self.kernel.unsent or any(member.channel.unsent for member in self.ranks):
                left = 0.005 if left is None else min(left, 0.005)
            if left is not None:
                left = min(left, 3600.0)  # epoll takes no more than 24 days
            for key, _ in self.selector.select(left):
                if key.fileobj in self.selector.get_map():  # not unregistered by an earlier one
                    key.data()
            for member in self.ranks:
                if member.channel.unsent:
                    member.channel.flush()
                if member.watch is None and member.alive:
                    self._check_alive(member)
            self.kernel.flush()
            self._pause_or_resume()

    def _kernel_died(self) -> None:  # or the template, without which nobody watches us
        raise KernelGone

    def _read_kernel(self) -> None:
        for message, descriptors in self.kernel.receive_available():
            if message[0] == "interrupt":
                self.interrupts.append(message[1])
            else:
                self.requests.append((message, descriptors))
        if self.kernel.closed:
            raise KernelGone

    def _read_rank(self, member: RankProcess) -> None:
        for message, descriptors in member.channel.receive_available():
            self._relay_output(member)
            if message[0] == "display":
                self.kernel.post(("display", member.number, *message[1:]))
                with contextlib.suppress(OSError):
                    os.write(descriptors[0], b"!")  # it waits for that
                os.close(descriptors[0])
            elif message[0] == "done":
                _, succeeded, content, member.group = message
                member.answered = True
                if succeeded and content is not None:
                    self.kernel.post(("result", member.number, content), descriptors)
                elif not succeeded:
                    self._fail(member, content)
        if member.channel.closed:
            self.selector.unregister(member.channel)
            self._see_off(member)

    def _see_off(self, member: RankProcess) -> None:
        """A rank's socket has closed: it is ending, or it has closed it and is of no more use."""
        if member.watch is not None and processes.is_ending(member.pid):
            return  # `_check_alive` will say how; to free its memory may take it a while
        if member.watch is not None and member.report is None and not self.stopping:
            summary = "closed its connection to the notebook (by os.closerange or os.exec, say)"
            self._fail(member, RankReport(member.number, "died", summary))
        processes.send_signal(member.pid, signal.SIGKILL)

    def _fail(self, member: RankProcess, report: RankReport) -> None:
        member.report = report
        self.failures.append(report)

    def _check_alive(self, member: RankProcess) -> None:
        try:
            pid, status = os.waitpid(member.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = member.pid, 0
        if not pid:
            return
        if member.watch is not None:
            self.selector.unregister(member.watch)
            os.close(member.watch)
        member.alive = False
        if not member.channel.closed:
            self._read_rank(member)  # what it sent before it ended
        self._drain(member)
        member.answered = True
        if member.report is None and not self.stopping:
            dump = os.pread(member.dump, 1 << 20, 0).decode(errors="replace")
            starved = processes.memory_kills() > self.memory_kills
            self._fail(member, death_report(member.number, status, dump, starved))

    # Output

    def _register_pipes(self, members: Iterable[RankProcess]) -> None:
        for member in members:
            for pipe in member.pipes:
                self.selector.register(
                    pipe, selectors.EVENT_READ, lambda m=member, p=pipe: self._read_pipe(m, p)
                )

    def _pause_or_resume(self) -> None:
        """Stop reading what ranks print while the kernel is behind; their prints then wait."""
        full = self.kernel.unsent > _BACKLOG
        if full == self.paused:
            return
        self.paused = full
        if full:
            for member in self.ranks:
                for pipe in member.pipes:
                    self.selector.unregister(pipe)
        else:
            self._register_pipes(self.ranks)

    def _read_pipe(self, member: RankProcess, pipe: int) -> bool:
        """Relay what is there; False when that was nothing."""
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return False
        if data:
            self.kernel.post(("output", member.number, member.pipes[pipe], data))
            return True
        if not self.paused:
            self.selector.unregister(pipe)
        del member.pipes[pipe]
        os.close(pipe)
        return False

    def _relay_output(self, member: RankProcess) -> None:
        """Relay all that a rank wrote until now, so that it arrives before what comes next."""
        for pipe in list(member.pipes):
            for _ in range(64):  # a pipe holds 16 such pieces at most, unless somebody writes on
                if not self._read_pipe(member, pipe):
                    break

    def _drain(self, member: RankProcess) -> None:
        self._relay_output(member)
        for pipe in list(member.pipes):
            if not self.paused:
                self.selector.unregister(pipe)
            del member.pipes[pipe]
            os.close(pipe)


def _raise_descriptor_limit() -> None:
    """256 ranks need more descriptors than many systems allow at first."""
    import resource  # Windows, where this module can be imported too, has none

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_job(sock: socket.socket, forks: bool) -> None:
    """The supervisor process, given its end of the kernel's socket."""
    kernel = Channel(sock)
    (_, job), _ = kernel.receive()
    Supervisor(kernel, job, forks).main()


def spawned(descriptor: int) -> NoReturn:
    """The entry point where there is no template to fork from."""
    run_job(socket.socket(fileno=descriptor), forks=False)
    os._exit(0)
