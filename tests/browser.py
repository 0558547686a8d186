"""A headless Chromium, and a web server for it. Without a Chromium, the tests that need it are skipped."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from typing import Any

import pytest

OPTIONS = ["--headless", "--no-sandbox", "--no-first-run", "--window-size=1400,1000"]  # root has no sandbox
OPTIONS += [
    f"--disable-{what}" for what in ("gpu", "quic", "background-networking", "component-update", "sync")
]

# The contrast is that of WCAG 2. Behind a text is the nearest background, or the colours of its gradient.
# They are painted, so that all notations are read.
CONTRASTS = """((selector) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    for (const paint of [getComputedStyle(document.body).backgroundColor, colour]) {  // it may have an alpha
      context.fillStyle = paint;
      context.fillRect(0, 0, 1, 1);
    }
    const linear = [...context.getImageData(0, 0, 1, 1).data].map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    const { backgroundColor, backgroundImage } = getComputedStyle(element);
    const colours = backgroundImage.match(/(oklch|rgb)\\([^)]*\\)/g) || [backgroundColor];
    return colours[0] === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : colours;
  };
  const least = {};
  for (const element of document.querySelectorAll(selector)) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || element.disabled || !element.checkVisibility({ visibilityProperty: true })) continue;
    const text = luminance(getComputedStyle(element).color), name = `${element.tagName}.${element.className}`;
    if (getComputedStyle(element).color.endsWith(", 0)")) continue;  // it is not to be seen
    for (const back of behind(element).map(luminance)) {
      const contrast = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
      least[name] = Math.min(contrast, least[name] ?? 21);
    }
  }
  return least;
})(...arguments)"""


class Browser:
    """What the tests need of selenium's driver."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, step: int | str = 0) -> None:
        """A new page is loaded even if only the step differs from the last one."""
        self.driver.get("about:blank")
        self.logs()
        self.driver.get(f"{page.resolve().as_uri()}#{step}")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; `arguments` are its arguments[0], arguments[1], …"""
        return self.driver.execute_script(f"return {script}", *arguments)

    def until(self, condition: str, seconds: float = 60) -> None:
        """Wait until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def text(self, id: str) -> str:
        return self.run("document.getElementById(arguments[0]).textContent", id)

    def texts(self, selector: str) -> list[str]:
        return self.run("[...document.querySelectorAll(arguments[0])].map((it) => it.textContent)", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, key: str) -> None:
        """Press a key, sent to the element that has the focus."""
        self.driver.switch_to.active_element.send_keys(key)

    def command(self, name: str, **arguments: Any) -> None:
        """A command of the DevTools protocol."""
        self.driver.execute_cdp_cmd(name, arguments)

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def contrasts(self, selector: str = "body *") -> dict[str, float]:
        """Tag and class of each text that is shown → its least contrast with what is behind it."""
        return self.run(CONTRASTS, selector)

    def logs(self) -> tuple[list[str], list[str]]:
        """Messages of the console, and addresses that were asked for, since the last call."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return console, [event["params"]["request"]["url"] for event in asked]


class Site:
    """A folder behind a web server, at the address `root`."""

    def __init__(self, folder: Path) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.root = f"http://127.0.0.1:{server.server_port}/"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Skips the test where selenium, Chromium or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = which("chromium"), which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
