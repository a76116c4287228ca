"""The page in a real Chromium, driven by Node against running servers.

Needs Debian's ``chromium``, Node 18 or newer, and what ``make page-test`` puts in ``.page-test/``.
Where one is missing the tests are skipped and say which. The usual tier has the reduced form.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.test_lost_models import lose
from tests.serverproc import Server, wait_until
from trserve.gateway.page_routes import FOLDER

HERE = Path(__file__).parent
MODULES = HERE.parents[1] / ".page-test"
SHOTS = MODULES / "shots"
TOKENS = 2000
WITHIN_S = 120.0
STATES_S = 40


def needed(*names: str) -> str:
    """The path of the first of these programs that is here; else the test is skipped."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no {names[0]} here")
    return found


@pytest.fixture(scope="module")
def node() -> str:
    return needed("node", "nodejs")


@pytest.fixture(scope="module")
def chromium(node: str) -> str:
    path = needed("chromium", "chromium-browser", "google-chrome")
    if not (MODULES / "node_modules" / "playwright-core").is_dir():
        pytest.skip("playwright-core is not in .page-test/ (make page-test puts it there)")
    SHOTS.mkdir(exist_ok=True)
    return path


def arguments(node: str, chromium: str, scenario: str, url: str, **more: Any) -> list[str]:
    settings = {"url": url, "chromium": chromium, "shots": str(SHOTS), **more}
    return [node, str(HERE / "drive.mjs"), scenario, str(MODULES), json.dumps(settings)]


def drive(node: str, chromium: str, scenario: str, url: str, **more: Any) -> Any:
    """What a scenario found; fails with what it said."""
    done = subprocess.run(
        arguments(node, chromium, scenario, url, **more),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    print(scenario, done.stdout.strip())
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(["--device", "cpu"]) as running:
        yield running


@pytest.mark.parametrize("check", ["cutter", "catalogue"])
def test_what_needs_no_browser(check: str, node: str) -> None:
    command = [node, str(HERE / f"{check}.mjs"), str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_page_in_use(node: str, chromium: str, server: Server) -> None:
    found = drive(node, chromium, "usual", server.url)
    assert sum(found["usage"].values()) > 20 and all(found["usage"].values())
    assert found["shares"][0] > 0.9 and found["shares"][1] == 0


@pytest.mark.slow
def test_widths_themes_languages_errors_and_copies(
    node: str, chromium: str, server: Server
) -> None:
    found = drive(node, chromium, "more", server.url)
    command = found["curl"].replace("curl -N", "curl -sN", 1)
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert told.stdout.rstrip().endswith("data: [DONE]"), told.stderr
    compile(found["python"], "copied.py", "exec")


@pytest.mark.slow
def test_the_main_thread_is_free_while_a_long_answer_comes(
    node: str, chromium: str, tmp_path: Path
) -> None:
    shipped = HERE.parents[1] / "trserve/emulated/profiles/a100-0.6b-32b.json"
    profile = json.loads(shipped.read_text())
    for model, step_ms in zip(profile["models"], (1.0, 1.5), strict=True):
        model["step"] = {"ms": step_ms, "source": "chosen: faster than a page is painted"}
    profile |= {"name": "fast", "max_model_len": 4096}
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(profile))
    emulated = ["--device", "emulated", "--models", "0.6b,32b", "--profile", str(path)]
    with Server(emulated) as running:
        # The CPU time of its tasks is the page's own, and looked at each time; how long a task took
        # is also a matter of who else has the cores.
        longest_ms = [
            drive(node, chromium, "long", running.url, tokens=TOKENS)["longest_task_ms"]
            for _ in range(3)
        ]
    assert min(longest_ms) <= 100, longest_ms


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_in_the_tab(node: str, chromium: str) -> None:
    with Server(["--device", "cpu", "--api-key", "sesame"]) as running:
        drive(node, chromium, "key", running.url, key="sesame")


@pytest.mark.slow
def test_it_says_what_the_server_is_at(node: str, chromium: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    command = arguments(node, chromium, "states", url, seconds=STATES_S, tries=100)
    browser = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    heard: list[str] = []

    def listen() -> None:
        assert browser.stdout is not None
        heard.extend(line for line in browser.stdout)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()

    def waits_for(text: str) -> None:
        lines = wait_until(lambda: list(heard), lambda found: text in "".join(found), 20.0)
        assert text in "".join(lines), lines

    slow = ["--port", str(port), "--router", "tests.page.slow_router:Slow"]
    try:
        with Server([*slow, "--device", "cpu", "--on-peer-loss", "degrade"]) as running:
            waits_for("The models are loading")
            waits_for('"Ready"')
            lose(running, 1)
            waits_for("Degraded")
            running.stop()
            waits_for("shutting down")
        waits_for("does not answer")
    finally:
        browser.kill()
        browser.wait()
        listener.join(5.0)
