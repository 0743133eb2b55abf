"""Headless Chromium driven through its debugging pipe: NUL-separated JSON on two file
descriptors, and nothing to install.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The browser's command, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def command() -> str | None:
    """The browser's command, installed if it can be; None, with the reason printed, if not."""
    found = find()
    if found is not None:
        return found
    reason = install()
    if reason is not None:
        print(f"skipped: {reason}")
        return None
    return find()


def failures(tests: Sequence[Callable[..., None]], *given: object) -> int:
    """Call each test with what is given, print how it went, and count those that failed."""
    failed = 0
    for function in tests:
        name = function.__name__.replace("_", " ")
        try:
            function(*given)
        except (AssertionError, RuntimeError, TimeoutError) as error:
            failed += 1
            print(f"FAILED {name}: {error}")
        else:
            print(f"passed {name}")
    print(f"{len(tests) - failed} passed, {failed} failed")
    return failed


def install() -> str | None:
    """Install Debian's package where that is possible; None if it worked, else the reason it
    did not.
    """
    if not shutil.which("apt-get"):
        return "no chromium here, and no apt-get to install it with"
    if os.geteuid() != 0:
        return "no chromium here, and only root can install it (apt-get install chromium)"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(
                ["apt-get", "-q", *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {command[0]} took longer than ten minutes"
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            return f"apt-get {command[0]} failed: {' '.join(last)}"
    return None if find() else "apt-get installed chromium, but it is not on the path"


class Browser:
    """A browser with its own empty profile; `page()` opens a tab."""

    def __init__(self, command: str) -> None:
        self.profile = tempfile.mkdtemp(prefix="wassail-browser-")
        # what we write, what we read
        mine = os.pipe()
        yours = os.pipe()
        # Above 9, so that moving them to 3 and 4 in the child cannot overwrite one of them.
        child = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (mine[0], yours[1])]

        def place() -> None:
            os.dup2(child[0], 3)
            os.dup2(child[1], 4)

        self.process = subprocess.Popen(
            [
                command,
                "--headless=new",
                "--no-sandbox",
                "--remote-debugging-pipe",
                f"--user-data-dir={self.profile}",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-extensions",
                "--disable-background-networking",
                "--disable-component-update",
                "--force-color-profile=srgb",
                "about:blank",
            ],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*child, mine[0], yours[1]):
            os.close(fd)
        self.write_to = mine[1]
        self.read_from = yours[0]
        self.buffer = b""
        self.last = 0
        self.events: list[dict[str, Any]] = []

    def send(
        self, method: str, session: str | None = None, timeout: float = 20, **parameters: Any
    ) -> dict[str, Any]:
        """One command and its answer; events that come in between are kept."""
        self.last += 1
        number = self.last
        message = {"id": number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        os.write(self.write_to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            answer = self._next(until)
            if answer is None:
                raise TimeoutError(f"{method}: no answer within {timeout:g} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found

    def wait(self, method: str, session: str, timeout: float = 20) -> None:
        """Until an event has come."""
        until = time.monotonic() + timeout
        while not any(
            event["method"] == method and event.get("sessionId") == session for event in self.events
        ):
            if self._next(until) is None:
                raise TimeoutError(f"{method}: not within {timeout:g} s")

    def _next(self, until: float) -> dict[str, Any] | None:
        while b"\0" not in self.buffer:
            ready = select.select([self.read_from], [], [], max(until - time.monotonic(), 0))[0]
            piece = os.read(self.read_from, 1 << 20) if ready else b""
            if not piece:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the browser ended with code {self.process.returncode}")
                return None
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def page(self, url: str, **options: Any) -> Page:
        """A new tab showing an address."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, target, session, url, **options)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Exception):
            self.send("Browser.close", timeout=5)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write_to)
        os.close(self.read_from)
        shutil.rmtree(self.profile, ignore_errors=True)


class Page:
    """One tab: what it logs and requests is recorded from the first byte on."""

    def __init__(
        self,
        browser: Browser,
        target: str,
        session: str,
        url: str,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
        phone: bool = False,
    ) -> None:
        self.browser = browser
        self.target = target
        self.session = session
        self.url = url
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")
        self.size(width, height, phone)
        self.media("", dark)
        if not scripts:
            self.send("Emulation.setScriptExecutionDisabled", value=True)
        self.send("Page.navigate", url=url)
        browser.wait("Page.loadEventFired", session)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for this tab."""
        return self.browser.send(method, self.session, **parameters)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The size of the window, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def media(self, kind: str, dark: bool = False) -> None:
        """Screen or print, light or dark; always without motion, which would move what is about
        to be clicked.
        """
        wishes = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce",
        }
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.send("Emulation.setEmulatedMedia", media=kind, features=features)

    def js(self, expression: str) -> Any:
        """The value of an expression; an exception in it is ours."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(
                found["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        return found["result"].get("value")

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.send(
            "Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {})
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, with the mouse."""
        x, y = self.js(
            "(() => { const e = document.querySelector(" + json.dumps(selector) + ");"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / "
            "2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
                buttons=1,
            )

    def picture(self, whole: bool = True) -> bytes:
        """A PNG of the window, or of the whole page."""
        found = self.send(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole)
        )
        return base64.b64decode(found["data"])

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        found = self.send(
            "Page.printToPDF",
            paperWidth=8.27,
            paperHeight=11.69,
            printBackground=True,
            preferCSSPageSize=True,
        )
        return base64.b64decode(found["data"])

    def troubles(self) -> list[str]:
        """Every exception, console error and log entry of level error or warning (a policy
        violation is one).
        """
        found = []
        for event in self._mine():
            kind = event["method"]
            body = event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(
                    "exception: "
                    f"{body['exceptionDetails'].get('exception', {}).get('description', body)}"
                )
            if kind == "Runtime.consoleAPICalled" and body["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(f"console {body['type']}: {body['args']}")
            if kind == "Log.entryAdded" and body["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {body['entry']['text']}")
            if kind == "Page.javascriptDialogOpening":
                found.append(f"dialog: {body['message']}")
        return found

    def requests(self) -> list[str]:
        """Addresses asked for, but for the page itself and pictures inside it."""
        urls = [
            event["params"]["request"]["url"]
            for event in self._mine()
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if url != self.url and not url.startswith("data:")]

    def names(self) -> list[tuple[str, str]]:
        """Role and name of everything in the accessibility tree."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [
            (node.get("role", {}).get("value", ""), node.get("name", {}).get("value", ""))
            for node in shown
        ]

    def _mine(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

    def close(self) -> None:
        """Close the tab."""
        self.browser.send("Target.closeTarget", targetId=self.target)


def address(path: Path) -> str:
    """A file as an address."""
    return path.resolve().as_uri()
