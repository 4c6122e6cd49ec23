"""JupyterLab in headless Chromium: what the browser tests and the slide checks drive.

python -m tools.browser NB OUT.png     opens a notebook, runs all cells, keeps a screenshot
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-color-profile=srgb "
    "--proxy-server=127.0.0.1:9"  # the port that discards: all but this machine is out of reach
).split()
LOCAL = ("http://127.0.0.1", "ws://127.0.0.1", "file:", "data:", "blob:", "about:")
QUIET = {"fetchNews": "false", "checkForUpdates": False}
POLL = 200  # milliseconds between looks: at every frame, the looking would cost a core
READY = """() => { const w = window.jupyterapp?.shell.currentWidget;
  return !!(w?.context?.isReady); }"""
IDLE = """() => { const s = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const k = s?.session?.kernel;
  return !!(s?.isReady && k && k.connectionStatus === 'connected' && k.status === 'idle'); }"""


def find_chromium() -> str | None:
    """The browser to drive: $COURSE_CHROMIUM, or one on the PATH; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = [shutil.which(name) for name in names]
    return os.environ.get("COURSE_CHROMIUM") or next((path for path in found if path), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fresh_settings(folder: Path) -> dict[str, str]:
    """An environment in which JupyterLab knows no user, no workspace and asks for no news."""
    news = folder / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps(QUIET), encoding="utf-8")
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return os.environ | threads | {name: str(folder / place) for name, place in places.items()}


@contextmanager
def lab_server(root: Path, *options: str) -> Iterator[str]:
    """JupyterLab over the folder `root`, at the address that is yielded; ended afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [
            *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            *("--IdentityProvider.token=t", f"--ServerApp.root_dir={root}"),
            *("--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"),
            *("--LabApp.extension_manager=readonly", *options),
        ]
        log = folder / "lab.log"
        with log.open("w", encoding="utf-8") as out:
            server = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=fresh_settings(folder)
            )
        try:
            wait_for_server(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def wait_for_server(address: str, server: subprocess.Popen, log: Path, seconds: float = 90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/api/status?token=t", timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    text = log.read_text(encoding="utf-8")[-2000:]
    raise RuntimeError(f"JupyterLab did not answer at {address}. Its log ends: {text}")


@dataclass
class Watched:
    """A page, and what went wrong on it."""

    page: object
    outside: list[str] = field(default_factory=list)  # requests that would have left this machine
    errors: list[str] = field(default_factory=list)  # console errors and uncaught exceptions

    def asked(self, url: str):
        """Record what is asked of another machine; the proxy of FLAGS refuses it."""
        if not url.startswith(LOCAL):
            self.outside.append(url)

    def listen(self):
        self.page.on("request", lambda request: self.asked(request.url))
        self.page.on("websocket", lambda socket: self.asked(socket.url))
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))


@contextmanager
def browser_page(width: int = 1280, height: int = 720, scale: float = 1) -> Iterator[Watched]:
    """A page of headless Chromium without any way to the network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, device_scale_factor=scale)
        watched = Watched(context.new_page())
        watched.listen()
        try:
            yield watched
        finally:
            browser.close()


def open_notebook(page, address: str, path: str, query: str = ""):
    """Open root/path in a fresh workspace and wait until its kernel is idle."""
    workspace = f"auto-{time.time_ns()}"
    page.goto(f"{address}/lab/workspaces/{workspace}/tree/{path}?token=t&reset{query}")
    page.wait_for_function(READY, timeout=90_000, polling=POLL)
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=60_000)
    page.wait_for_function(IDLE, timeout=90_000, polling=POLL)


def command(page, name: str, **arguments):
    """Run a command of JupyterLab; its promise ends when the command does."""
    return page.evaluate(
        "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => true)",
        [name, arguments],
    )


def run_all(page, timeout: float = 240_000):
    """Run every cell and wait for the kernel to be idle."""
    command(page, "notebook:run-all-cells")
    page.wait_for_function(IDLE, timeout=timeout, polling=POLL)


def main(notebook: str, picture: str) -> int:
    path = Path(notebook).resolve()
    with lab_server(path.parent) as address, browser_page(height=1600) as watched:
        open_notebook(watched.page, address, path.name)
        run_all(watched.page)
        watched.page.screenshot(path=picture)
        print(f"{picture}; errors: {watched.errors}; outside requests: {watched.outside}")
    return 1 if watched.errors or watched.outside else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
