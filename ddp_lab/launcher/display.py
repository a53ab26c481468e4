"""`display()` in a rank: the object is rendered there, the notebook shows it."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

Publish = Callable[[dict[str, Any], dict[str, Any]], None]  # (data by MIME type, metadata)


def install(publish: Publish) -> None:
    """Replace IPython's display functions in this process by ones that call `publish`."""
    from IPython import display as public
    from IPython.core import display_functions

    def display(
        *objs: Any,
        include: Any = None,
        exclude: Any = None,
        metadata: dict[str, Any] | None = None,
        raw: bool = False,
        display_id: Any = None,
        **_: Any,
    ) -> Any:
        for obj in objs:
            data, extra = (obj, {}) if raw else render(obj, include, exclude)
            if data:  # empty when the object has displayed itself
                publish(data, {**extra, **(metadata or {})})
        if not display_id:
            return None
        return public.DisplayHandle(None if display_id is True else display_id)

    def publish_display_data(data: Any, metadata: Any = None, **_: Any) -> None:
        publish(data, metadata or {})

    for module in (display_functions, public):
        vars(module).update(display=display, publish_display_data=publish_display_data)
    builtins.display = display  # type: ignore[attr-defined]  # IPython puts it there, too


def render(
    obj: Any, include: Any = None, exclude: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(data by MIME type, metadata) as a notebook would render the object."""
    return _formatter().format(obj, include=include, exclude=exclude)  # type: ignore[no-any-return]


@cache
def _formatter() -> Any:
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    png = formatter.formatters["image/png"]
    png.for_type_by_name(
        "matplotlib.figure", "Figure", lambda figure: print_figure(figure, "png", base64=True)
    )
    return formatter


def show_open_figures() -> None:
    """Show and close the figures of matplotlib's state machine, as the end of a cell does."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else []:
        builtins.display(pyplot.figure(number))  # type: ignore[attr-defined, union-attr]
        pyplot.close(number)  # type: ignore[union-attr]
