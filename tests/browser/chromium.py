"""Chromium without a window, driven by selenium: Debian's packages chromium and chromium-driver."""

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

LONG = 60  # seconds after which a page that is not there is an error, on a machine that does other things too


class Browser:
    """One window of Chromium of a size in CSS pixels; FileNotFoundError if it or its driver is not installed."""

    def __init__(self, *, width=1440, height=1000):
        options = webdriver.ChromeOptions()
        options.binary_location = _program("chromium")
        # A root user in a container has no sandbox; the pages are our own.
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
        self.resize(width, height)

    def resize(self, width, height):
        """Set the size of the page, without what a window has around it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def media(self, *, dark=False, kind=""):
        """Show pages as a system with dark colours does, or as on paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": [scheme]})

    def open(self, path, fragment=""):
        """Load a page from disk anew, and wait for its matrix."""
        self.driver.get("about:blank")
        self.driver.get(f"{path.as_uri()}{fragment}")
        self.until("return performance.getEntriesByName('matrix').length")
        if "case=" in fragment:
            self.until_drawn()

    def until_drawn(self):
        """Wait for the opened case with all of its plots."""
        self.until("return document.body.dataset.drawn !== undefined")

    def until(self, script, *arguments):
        """Wait until JavaScript returns something true, and return it."""
        return WebDriverWait(self.driver, LONG, poll_frequency=0.02).until(
            lambda driver: driver.execute_script(script, *arguments), message=script
        )

    def run(self, script, *arguments):
        """Run JavaScript in the page, and return its result."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector):
        """The elements that a CSS selector finds."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        """The only element that a CSS selector finds."""
        (found,) = self.all(selector)
        return found

    def texts(self, selector):
        """The texts of the elements that a selector finds, also of hidden ones, with single spaces."""
        script = """
            return [...document.querySelectorAll(arguments[0])].map((one) =>
              one.textContent.replace(/\\s+/g, ' ').trim());"""
        return self.run(script, selector)

    def messages(self):
        """What the console of the page has had since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def close(self):
        """End the browser."""
        self.driver.quit()


def _program(name):
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: apt-get install chromium chromium-driver")
    return path
