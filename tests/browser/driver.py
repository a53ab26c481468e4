"""JupyterLab, started by `ddp-lab lab`, and a page of it in a headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from playwright.sync_api import Browser, Locator, Page, Playwright, expect

ROOT = Path(__file__).parents[2]
PATIENCE = 60_000  # ms; a busy machine is slow, and no test waits for this when all is well


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def start_chromium(playwright: Playwright) -> Browser:
    quiet = ("background-networking", "component-update", "sync")
    return playwright.chromium.launch(
        executable_path=find_chromium(), args=["--no-sandbox", *(f"--disable-{q}" for q in quiet)]
    )


class Lab:
    """A JupyterLab that runs: its address, its process, and the notebook that it opens."""

    def __init__(self, notebook: Path, process: subprocess.Popen[bytes], url: str, token: str):
        self.notebook, self.process, self.url, self.token = notebook, process, url, token


@contextmanager
def jupyterlab(
    notebook: Path, folder: Path, options: Sequence[str] = (), **environment: str
) -> Iterator[Lab]:
    """Open a notebook as a learner does, with `ddp-lab lab`, but with settings in `folder`.

    Jupyter chooses the port. On leaving, Jupyter is asked to end, as by Ctrl-C.
    """
    settings = folder / "lab_settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    no_news = {"fetchNews": "false", "checkForUpdates": False}  # no pop-up, no request
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(no_news))
    kinds = ("CONFIG", "DATA", "RUNTIME")
    folders = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in kinds}
    folders |= {
        f"JUPYTERLAB_{kind}_DIR": str(folder / f"lab_{kind.lower()}")
        for kind in ("SETTINGS", "WORKSPACES")
    }
    folders["IPYTHONDIR"] = str(folder / "ipython")
    log = folder / "lab.log"
    command = [sys.executable, "-m", "ddp_lab", "lab", str(notebook), "--no-browser", "--port=0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--ip=127.0.0.1", "--LabApp.expose_app_in_browser=True", *options],
            env={**os.environ, **folders, **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield Lab(notebook, process, *_address(process, folder / "runtime", log))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> tuple[str, str]:
    """(URL, token) from the file that a Jupyter server writes once it listens."""
    path = runtime / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            facts = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.05)
        else:
            return facts["url"], facts["token"]
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


class NotebookPage:
    """A notebook in the browser. Cells go by their number in the notebook, from 0."""

    def __init__(self, page: Page, lab: Lab) -> None:
        self.page, self.lab = page, lab
        self.complaints: list[str] = []  # of the page's scripts
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(f"{lab.url}lab/tree/{lab.notebook.name}?reset&token={lab.token}")
        self.expect_kernel("Idle")

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url')})")

    def expect_kernel(self, status: str) -> None:
        """Wait for a status; the circle in the toolbar says Idle before there is a kernel."""
        expect(self.page.locator("#jp-main-statusbar")).to_contain_text(f"(ipykernel) | {status}")

    def cell(self, number: int) -> Locator:
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{number}"]')

    def output(self, number: int) -> Locator:
        """What a cell has put out. The cell's source often holds the same text."""
        return self.cell(number).locator(".jp-Cell-outputArea")

    def show(self, number: int) -> None:
        """Make a cell the active one and scroll to it: others may not be in the page."""
        self.page.evaluate(
            """async number => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = number;
                await notebook.scrollToItem(number, 'center');
            }""",
            number,
        )
        expect(self.cell(number)).to_be_visible()

    def run(self, number: int) -> None:
        """Start a cell by Ctrl-Enter."""
        self.show(number)
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def run_all(self) -> None:
        self.menu("Run", "runmenu:run-all")

    def wait_until_run(self, *numbers: int) -> None:
        """Wait until these code cells have run, or all of them."""
        self.page.wait_for_function(
            """numbers => window.jupyterapp.shell.currentWidget.content.widgets.every(
                (cell, i) => cell.model.type !== 'code' || numbers.length && !numbers.includes(i)
                    || cell.model.executionCount && cell.model.executionState !== 'running')""",
            arg=list(numbers),
        )

    def saved(self) -> NotebookNode:
        """The notebook as the learner would save it now."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return nbformat.read(self.lab.notebook, as_version=4)

    def menu(self, top: str, *items: str) -> None:
        """Choose from a menu; an item is a command's id or an exact label."""
        self.page.locator("#jp-MainMenu").get_by_role("menuitem", name=top, exact=True).click()
        for item in items:
            command = f'.lm-Menu [data-command="{item}"]'
            label = f'.lm-Menu .lm-Menu-itemLabel:text-is("{item}")'
            self.page.locator(command if ":" in item else label).first.click()
        expect(self.page.locator(".lm-Menu")).to_have_count(0)

    def stop(self) -> None:
        """Press the stop button."""
        self.page.locator(
            '.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]'
        ).click()

    def restart(self) -> None:
        """Restart the kernel through the menu, and wait for the new one."""
        self.menu("Kernel", "kernelmenu:restart")
        with self.page.expect_response(re.compile(r"/api/kernels/[^/]+/restart")):
            self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.expect_kernel("Idle")

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark"."""
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", name
        )
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-name", name)
