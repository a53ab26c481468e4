"""Make the pictures of the README: a launch in JupyterLab, in the light and in the dark theme.

    python -m docs.screenshot

Run it in the repository's folder; it needs the package's `dev` extra and a Chromium.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect, sync_playwright

from tests.browser.driver import ROOT, NotebookPage, jupyterlab, start_chromium

CELLS = (
    """\
import torch
import torch.distributed as dist
from ddp_lab import launch""",
    """\
def total():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    print("our numbers add up to", x.item())

launch(total, nproc_per_node=4)""",
    """\
labels = [3, 1, 12, 5]

def check_label():
    label = labels[dist.get_rank()]
    if label > 9:
        raise ValueError(f"label {label} is not a digit")
    dist.barrier()

launch(check_label, nproc_per_node=4)""",
    "",  # the active cell, which is left out
)
WIDTH, SCALE = 1280, 1.5  # pixels of the picture, pixels for one of the page
MARGIN = 8


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        path = folder / "work" / "launch.ipynb"
        path.parent.mkdir()
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in CELLS])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, path)
        browser = start_chromium(playwright)
        with jupyterlab(path, folder / "jupyter", DDP_LAB_OUTPUT="by-rank") as lab:
            size = {"width": round(WIDTH / SCALE), "height": 1000}
            page = browser.new_page(viewport=size, device_scale_factor=SCALE)
            take_pictures(NotebookPage(page, lab), ROOT / "docs" / "images")
        browser.close()


def take_pictures(notebook: NotebookPage, folder: Path) -> None:
    page = notebook.page
    for command, side in (("left-area", ""), ("side-tabbar", "left"), ("side-tabbar", "right")):
        page.evaluate(
            "([id, side]) => window.jupyterapp.commands.execute(id, {side})",
            [f"application:toggle-{command}", side],
        )
    expect(page.locator("#jp-left-stack")).to_be_hidden()
    for number in range(len(CELLS) - 1):
        notebook.run(number)
        notebook.wait_until_run(number)
    notebook.expect_kernel("Idle")
    notebook.show(len(CELLS) - 1)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(0, 'start')")
    page.mouse.move(0, 0)
    panel = page.locator(".jp-NotebookPanel-notebook").bounding_box()
    size = page.viewport_size
    assert panel and size
    frame = size["width"] - panel["width"]  # left and right of the notebook
    page.set_viewport_size({**size, "width": size["width"] + round(frame)})
    for theme, name in (("Light", "launch.png"), ("Dark", "launch-dark.png")):
        notebook.theme(f"JupyterLab {theme}")
        first, last = (notebook.cell(n).bounding_box() for n in (0, len(CELLS) - 2))
        assert first and last
        top, bottom = first["y"] - MARGIN, last["y"] + last["height"]
        clip = {"x": panel["x"], "y": top, "width": WIDTH / SCALE, "height": bottom - top}
        page.screenshot(path=folder / name, clip=clip, animations="disabled")


if __name__ == "__main__":
    main()
