"""Ranks that stay: `World`, and `launch`, which is a World used once."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ddp_lab.launcher.call import Call, prepare, refuse_nested
from ddp_lab.launcher.conversation import Conversation, Link
from ddp_lab.launcher.errors import LaunchError
from ddp_lab.launcher.interrupts import HoldInterrupts
from ddp_lab.launcher.options import Function, Options
from ddp_lab.launcher.output import Output, RankOutput
from ddp_lab.launcher.results import Results

_LOST = "the World starts afresh at its next call: its variables are lost"


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
    with HoldInterrupts(), World._of(options) as world:  # none hits between call and shutdown
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
        refuse_nested()
        self.options = options
        self._link: Link | None = None
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
        with self._busy, HoldInterrupts() as hold:
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

    def _call(self, call: Call, picked: Sequence[int] | None = None) -> Results:
        """Run a call on the picked ranks, on all by default."""
        try:
            self._mode = mode = self.options.output_mode
            with self._busy, HoldInterrupts() as hold:
                if self._closed:
                    raise LaunchError("this World has been shut down: make a new one")
                self._forget_foreign_link()
                if self._link is None:
                    self._link = Link(self.options)
                conversation = Conversation(self._link, self.options, mode, hold)
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


def _update_namespace(names: dict[str, Any]) -> None:
    sys.modules["__main__"].__dict__.update(names)


def _read_namespace(name: str) -> Any:
    namespace = sys.modules["__main__"].__dict__
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined in this rank")
    return namespace[name]
