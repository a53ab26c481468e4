"""Reports of ranks that failed: from an exception, a stack, or the way in which a rank ended."""

from __future__ import annotations

import os
import re
import signal
import traceback
from typing import Any

from ddp_lab.launcher import source
from ddp_lab.launcher.errors import RankReport

_PLAIN = "return numbers, tensors, a state_dict or other plain data"


class UnsendableResult(Exception):
    """Stands for a result that could not be pickled."""

    def __init__(self, value: Any, error: Exception) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        if isinstance(error, OSError):
            super().__init__(f"returned a {kind}, and there was no room to send it ({error})")
        else:
            super().__init__(
                f"returned a {kind}, which cannot be sent to the notebook ({error}): {_PLAIN}"
            )


def describe_lost_result(rank: int, error: BaseException) -> RankReport:
    """A report, made in the notebook, of a result that arrived but cannot be unpickled there."""
    summary = (
        "returned something that cannot be rebuilt in the notebook "
        f"({_name_and_message(error)}): {_PLAIN}"
    )
    return RankReport(rank, "raised", summary, (), _whole_traceback(error))


# gloo and NCCL say one of these when a peer has gone: a consequence, never the cause.
_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed"
    r"|Timed out waiting|Application timeout caused pair closure"
    r"|NCCL communicator was aborted|remote process exited",
    re.IGNORECASE,
)


_CPP_FILE = re.compile(r"(?<![\w.+/-])(?:/[\w.+-]+)+/([\w.+-]+\.(?:cc|cpp|cu|h|hpp))\b")
_LONGEST = 10_000  # characters of a message


def describe(rank: int, error: BaseException) -> RankReport:
    """A report of an exception, as text only."""
    try:
        return _describe(rank, error)
    except BaseException:  # the exception's own code (__str__, __repr__, __notes__) fails
        summary = f"raised {type(error).__qualname__}: (its message cannot be shown)"
        lines = source.learners_lines(source.traceback_places(error.__traceback__))
        return RankReport(rank, "raised", summary, tuple(lines))


def _describe(rank: int, error: BaseException) -> RankReport:
    lines = source.learners_lines(source.traceback_places(error.__traceback__))
    details = []
    if isinstance(error, UnsendableResult):
        summary, lines = str(error), []
    elif isinstance(error, SystemExit):
        summary = f"called sys.exit({error.code!r})"
    else:
        summary = f"raised {_name_and_message(error)}"
        if function := source.library_function(error.__traceback__):
            details.append(f"inside {function}")
        if isinstance(error, SyntaxError) and error.text:
            details.append(f"{error.filename}, line {error.lineno}:  {error.text.strip()}")
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is not None:
            details.append(f"after {_name_and_message(earlier)}")
        details += getattr(error, "__notes__", [])
    consequence = bool(_CONSEQUENCE.search(summary))
    if consequence:  # gloo's own words name addresses and its source files; they stay below
        summary, details = "lost its connection to another rank", []
    return RankReport(
        rank, "raised", summary, tuple(lines), _whole_traceback(error), tuple(details), consequence
    )


def _name_and_message(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} [... {len(message) - _LONGEST} more characters]"
    message = _CPP_FILE.sub(r"\1", message)  # paths of the machine that built torch
    name = type(error).__qualname__
    return f"{name}: {message}" if message else name


def _whole_traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "(its traceback cannot be shown)"


def stuck_report(number: int, dump: str) -> RankReport:
    """Where a rank was, from its stack: which call, at which of the learner's lines."""
    places = source.dumped_places(dump)
    if not places:
        return RankReport(number, "stuck", "was busy and did not answer", (), dump)
    lines = source.learners_lines(reversed(places))
    collective = ""
    for file, _, function in places:
        if source.is_learners(file):
            break
        if file.endswith(("distributed_c10d.py", "_tensor.py")) and not function.startswith("_"):
            collective = function
    summary = f"was in {collective}" if collective else "was running"
    return RankReport(number, "stuck", summary, tuple(lines), dump)


def death_report(number: int, status: int, dump: str, out_of_memory: bool) -> RankReport:
    """How a rank ended, by its wait status and by what `faulthandler` wrote on its way down.

    out_of_memory: has the system killed a process for want of memory meanwhile?
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        summary = f"ended with exit code {code}, without returning (os._exit, or C's exit)"
    else:
        summary = f"was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL and out_of_memory:
            summary += ", by the system, because memory ran out"
    fatal = dump[dump.find("Fatal Python error") :] if "Fatal Python error" in dump else ""
    lines = source.learners_lines(reversed(source.dumped_places(fatal)))
    return RankReport(number, "died", summary, tuple(lines), fatal)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
