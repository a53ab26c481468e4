"""A browser for the tests of a module, and a JupyterLab for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, sync_playwright

from tests.browser.driver import NotebookPage, find_chromium, jupyterlab, start_chromium


@pytest.fixture(scope="module")  # not longer: an asyncio loop runs as long as it does
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no Chromium, and in CI browser tests may not be skipped")
        pytest.skip("there is no Chromium")
    with sync_playwright() as playwright:
        browser = start_chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture
def open_notebook(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., NotebookPage]]:
    """open_notebook(*cells) or open_notebook(path) opens it, in a JupyterLab of its own."""
    with ExitStack() as stack:

        def open_notebook(*cells: str | Path, options: tuple[str, ...] = ()) -> NotebookPage:
            work = tmp_path / "work"
            work.mkdir()
            copy = work / "notebook.ipynb"
            if isinstance(cells[0], Path):
                notebook = nbformat.read(cells[0], as_version=4)
                for cell in notebook.cells:
                    if cell.cell_type == "code":
                        cell.update(outputs=[], execution_count=None)
            else:
                notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
                notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
            nbformat.write(notebook, copy)
            lab = stack.enter_context(jupyterlab(copy, tmp_path / "jupyter", options))
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            stack.callback(page.close)
            return NotebookPage(page, lab)

        yield open_notebook
