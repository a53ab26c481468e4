"""A call on its way to the ranks: checked, and pickled once for all of them."""

from __future__ import annotations

from typing import Any

from ddp_lab.launcher import rank, travel
from ddp_lab.launcher.errors import LaunchError
from ddp_lab.launcher.options import Function, check_function
from ddp_lab.launcher.travel import Parcel


class Call:
    """A function and its arguments, ready to travel."""

    def __init__(self, parcel: Parcel, sources: dict[str, str]) -> None:
        self.parcel = parcel
        self.sources = sources


def prepare(fn: Function, args: tuple[Any, ...]) -> Call:
    """Check and pickle a call. Raises TypeError, naming what cannot be sent to other processes."""
    refuse_nested()
    check_function(fn, args)
    try:
        return Call(*travel.pack((fn, args), travel.CallPickler))
    except MemoryError:
        raise
    except OSError as error:
        raise LaunchError(f"there was no room to send the call to the ranks ({error})") from error
    except Exception as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        guilty = travel.culprit(fn, args) or f"something that {name} uses"
        message = (
            f"{name} cannot be sent to the ranks, since {guilty} cannot be pickled ({error}): "
            "create it inside the function, so that each rank makes its own"
        )
    raise TypeError(message)


def refuse_nested() -> None:
    """Raise LaunchError in a rank."""
    if rank.current is not None:
        raise LaunchError(
            "launch and World were called inside a rank, which cannot start ranks itself: call "
            "them from the notebook"
        )
