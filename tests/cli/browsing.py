"""Debian's Chromium, without a screen, and the page of `torch-ros web` in it."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = "needs a browser: apt-get install -y chromium chromium-driver"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def is_there():
    return CHROMIUM.exists() and DRIVER.exists()


@contextlib.contextmanager
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(driver.capabilities["chrome"]["userDataDir"], ignore_errors=True)


def resize(driver, width, height, scheme="dark", scale=1):
    """The window, and whether its user likes it dark or light."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    liked = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": liked})


@contextlib.contextmanager
def page(endpoint, model, port=0):
    """`torch-ros web` as a process; its address."""
    command = [sys.executable, "-m", "torch_ros", "--endpoint", endpoint, "web", model]
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server.stdout.readline().split()[0].removesuffix(":")
        finally:
            server.terminate()
