"""The live page in a real browser, over a real etcd."""

import time
from urllib.parse import urlsplit

import browsing
import pytest
import torch
from crowd import RUN, Crowd

import torch_ros
from torch_ros.store.endpoint import connect

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not browsing.is_there(), reason=browsing.MISSING),
    pytest.mark.xdist_group("browser"),
]
SCRIPT = "<img src=x onerror=document.title='owned'>"
NEWEST = "return document.getElementById('newest').firstChild.data"
WAIT_S = 60
FRAMES = """
const done = arguments[arguments.length - 1], drawn = drawMoving, from = performance.now();
let frames = 0, drawings = 0, worst = 0, last = from, most = 0;
drawMoving = ms => { drawings++; drawn(ms); };
requestAnimationFrame(function next(now) {
  frames++; worst = Math.max(worst, now - last); last = now; most = Math.max(most, edges.length);
  if (now - from < 5000) return requestAnimationFrame(next);
  drawMoving = drawn;
  done([frames / (now - from) * 1000, drawings / (now - from) * 1000, worst, most]);
});
"""
SEEN = """
window.seen = {};
const newest = document.getElementById('newest');
new MutationObserver(() => {
  const text = newest.firstChild.data;
  requestAnimationFrame(() => { window.seen[text] ??= Date.now(); });
}).observe(newest, {characterData: true, subtree: true, childList: true});
"""


@pytest.fixture(scope="module")
def driver():
    with browsing.browser() as driver:
        yield driver


@pytest.fixture
def endpoint(etcd_endpoint):
    return etcd_endpoint


@pytest.fixture
def address(endpoint, crowd):
    with browsing.page(endpoint, crowd.keys.model) as address:
        yield address


@pytest.fixture
def shown(driver, address):
    """The page, with its first fleet; nothing may have gone wrong in it at the end."""
    driver.get_log("browser")
    browsing.resize(driver, 1280, 800)
    driver.get(address)
    until(driver, NEWEST, "1")
    yield driver
    found = driver.get_log("browser")
    driver.get("about:blank")  # or it would look for its server, which ends
    assert [entry for entry in found if address in entry["message"]] == []


def until(driver, script, value):
    deadline = time.monotonic() + WAIT_S
    while (found := driver.execute_script(script)) != value:
        assert time.monotonic() < deadline, (found, value)
        time.sleep(0.02)


def status(driver):
    return driver.execute_script("return document.getElementById('status').dataset.is")


def names(driver):
    rows = "[...document.querySelectorAll('#rows tr[data-name]')]"
    return driver.execute_script(f"return {rows}.map(tr => tr.dataset.name)")


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def test_a_version_is_shown_that_is_published(shown, crowd, etcd_endpoint):
    """It prints after how many seconds; three in a row."""
    shown.execute_script(SEEN)
    options = {"endpoint": etcd_endpoint, "run": "new", "timeout_s": 20}
    handle = torch_ros.open(crowd.keys.model, replica="other", **options)
    handle.register({"w": torch.ones(4)})
    took_s = []
    for version in (7, 8, 9):
        began_s = time.time()
        handle.publish(version)
        returned_s = time.time()
        until(shown, f"return '{version}' in seen", value=True)
        seen_s = shown.execute_script(f"return seen['{version}']") / 1000
        took_s.append((round(seen_s - began_s, 3), round(seen_s - returned_s, 3)))
        handle.unpublish()
    handle.close(linger_s=0)
    print(f"seconds from the call of publish, and from its return, to the frame: {took_s}")


def test_a_name_like_a_script_is_text(shown, crowd):
    crowd.join(SCRIPT, SCRIPT)
    crowd.read(SCRIPT, "trainer", 1)
    crowd.commit()
    until(shown, "return document.querySelectorAll('#rows tr[data-name]').length", 2)
    shown.execute_script("select(arguments[0], true); point(arguments[0])", SCRIPT)
    assert SCRIPT in names(shown)
    assert SCRIPT in shown.execute_script("return document.getElementById('tip').textContent")
    assert shown.execute_script("return document.querySelectorAll('img').length") == 0
    assert shown.title == f"{crowd.keys.model} · torch_ros"


def test_a_thousand_replicas_move(shown, crowd):
    """It prints the frames per second; all replicas are in the table and in the graph."""
    many = [f"rollout-{number}" for number in range(1000)]
    for name in many:
        crowd.join(name, f"place-{len(name)}")
        crowd.hold(name, 1)
    crowd.commit()
    until(shown, "return document.getElementById('table').getAttribute('aria-rowcount')", "1002")
    crowd.publish("trainer", 2)
    for place, name in enumerate(many):
        crowd.read(name, many[place // 2], 2)
    crowd.commit()
    until(shown, "return edges.length", 999)
    until(shown, "return document.getElementById('reads').firstChild.data", "1000")
    shown.set_script_timeout(60)
    frames, drawings, worst_ms, edges = shown.execute_async_script(FRAMES)
    print(
        f"{frames:.1f} frames a second, {drawings:.1f} drawings, {edges} edges, "
        f"the longest frame {worst_ms:.0f} ms"
    )
    assert drawings > 0
    assert shown.execute_script("return nodes.size") == 1001
    assert len(names(shown)) < 100  # only what is seen has elements
    press(shown, "/", "rollout-99")
    until(shown, "return document.getElementById('shown').textContent", "11 of 1001")


def test_the_page_and_etcd_and_the_server_come_back(driver, etcd_server):
    endpoint = f"etcd://{etcd_server.host}"
    kv = connect(endpoint, timeout_s=10)
    crowd = Crowd(kv, "policy")
    crowd.join("trainer")
    crowd.publish("trainer", 1)
    crowd.commit()
    with browsing.page(endpoint, "policy") as address:
        driver.get(address)
        until(driver, NEWEST, "1")
        etcd_server.kill()
        until(driver, "return document.getElementById('status').dataset.is", "trouble")
        etcd_server.start()
        crowd.publish("trainer", 2)
        crowd.commit()
        until(driver, NEWEST, "2")
        until(driver, "return document.getElementById('status').dataset.is", "live")
        driver.refresh()
        until(driver, NEWEST, "2")
    until(driver, "return document.getElementById('status').dataset.is", "waiting")
    with browsing.page(endpoint, "policy", urlsplit(address).port):
        until(driver, "return document.getElementById('status').dataset.is", "live")
        crowd.publish("trainer", 3)
        crowd.commit()
        until(driver, NEWEST, "3")
    # The browser itself notes each try that found no server; the page has no error of its own.
    noted = [each for each in driver.get_log("browser") if each["source"] != "network"]
    assert noted == []
    kv.close()


def test_keys_select_sort_and_go_back_in_time(shown, crowd):
    from selenium.webdriver.common.keys import Keys

    for number in range(100):
        crowd.join(f"r{number}")
    crowd.commit()
    until(shown, "return shown.lines.size", 101)
    crowd.publish("trainer", 2)
    crowd.commit()
    until(shown, NEWEST, "2")
    press(shown, "/", "r9")
    until(shown, "return order.length", 11)
    press(shown, Keys.ESCAPE)  # the filter goes, and the table has the focus
    press(shown, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert shown.execute_script("return selected") == "r1"
    press(shown, Keys.END)
    assert shown.execute_script("return selected") == "trainer"
    assert "trainer" in names(shown)
    press(shown, Keys.ESCAPE)
    head = shown.find_element("css selector", "th button[data-by=version]")
    head.send_keys(Keys.ENTER)
    head.send_keys(Keys.ENTER)
    assert shown.execute_script("return order[0].replica") == "trainer"
    slider = shown.find_element("id", "slider")
    slider.send_keys(Keys.HOME)  # the oldest that the page knows
    until(shown, NEWEST, "1")
    assert status(shown) == "past"
    crowd.publish("trainer", 3)
    crowd.commit()
    until(shown, "return now.latest", f"{RUN}/3")
    assert shown.execute_script(NEWEST) == "1"
    press(shown, Keys.ESCAPE)
    until(shown, NEWEST, "3")
    assert status(shown) == "live"


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 700, 1600])
def test_it_fits_a_window(shown, crowd, scheme, width):
    crowd.join("a-replica-with-a-name-that-is-as-long-as-names-of-pods-are-7f4b9c8d6-x2x4z")
    crowd.commit()
    browsing.resize(shown, width, 900, scheme)
    until(shown, "return document.documentElement.dataset.theme", scheme)
    until(shown, "return shown.lines.size", 2)
    wide = shown.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    ink, paper = shown.execute_script(
        "const s = getComputedStyle(document.documentElement); return [s.color, s.backgroundColor]"
    )
    assert (bright(ink) > bright(paper)) == (scheme == "dark")


def bright(colour):
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")[:3]))
