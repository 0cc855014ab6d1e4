"""A sweep as a person makes one: the form, the run, its artifacts, the curves, the report; in headless Chromium."""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from margrpo.params import load_params
from pipeline.sweeps.cells import rewrite
from tests.pipeline.pretended import environment, git
from tests.pipeline.served import Served, processes_in, serve
from tests.pipeline.test_end_to_end import clone

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "build" / "browser"
# Without these, Chromium looks for its vendor's hosts at every start.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]
TINY = {
    "train": {
        "updates": 5,
        "prompts_per_update": 4,
        "images_per_prompt": 4,
        "validation_every": 5,
        "validation_images": 16,
        "checkpoint_every": 5,
        "milestone": None,
    },
    "evaluation": {"prompts": 16, "images_per_prompt": 2, "kl_prompts": 4, "grid_prompts": 4},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of this repository whose smoke profile is smaller still."""
    folder = clone(ROOT, tmp_path_factory.mktemp("browser") / "project")
    params = load_params(folder / "params.yaml")
    params["profiles"]["smoke"] |= TINY
    rewrite(folder / "params.yaml", params)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a tiny profile")
    return folder


@pytest.fixture(scope="module")
def served(project: Path) -> Iterator[Served]:
    with serve(project, environment(project)) as found:
        yield found


class Browser:
    """A page that notes what it asks of other machines and what it complains about."""

    def __init__(self, page: object) -> None:
        from playwright.sync_api import Page

        assert isinstance(page, Page)
        self.page = page
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.shots = 0
        page.set_default_timeout(180_000)  # a busy machine
        page.on("request", lambda request: self._note(request.url))
        page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "file:")):
            self.outside.append(url)

    def choose(self, shown: str, *options: str) -> None:
        """Choose options of the list that shows a text now."""
        button = self.page.locator(".p-select-button__control", has_text=re.compile(f"^{shown}$"))
        button.focus()
        self.page.keyboard.press("ArrowDown")  # opens it
        for option in options:
            self.page.locator(".p-select-option__text", has_text=re.compile(f"^{option}$")).click()
        self.page.get_by_text("Parameters", exact=True).first.click()  # closes a list of several

    def picture(self, name: str) -> None:
        """Write a screenshot that somebody can look at."""
        self.shots += 1
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{self.shots}_{name}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed (Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Browser(started.new_page(viewport={"width": 1600, "height": 1300}))
        started.close()


def test_from_the_form_to_the_curves(project: Path, served: Served, browser: Browser) -> None:
    page = browser.page
    page.goto(f"{served.prefect}/deployments")
    page.get_by_text("ablation-sweep").first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    page.get_by_text("No items selected").wait_for()
    page.locator("textarea").first.fill("browser")
    browser.choose("No items selected", "grpo", "mar_grpo_bridged")
    browser.choose("none", "smoke")
    browser.picture("form")
    page.get_by_role("button", name="Submit").click()
    run = _newest(served)
    state = served.finish(run, 1800)
    assert state["type"] == "COMPLETED", state
    assert git(project, "status", "--porcelain") == ""

    page.goto(f"{served.prefect}/runs/flow-run/{run}")
    page.get_by_text("Completed").first.wait_for()
    page.get_by_text("2 cells, 0 of them made before").first.wait_for()  # the log
    browser.picture("run")
    page.get_by_text("Artifacts", exact=True).click()
    page.get_by_text("sweep-browser", exact=True).first.click()
    page.get_by_text("Sweep browser", exact=True).wait_for()
    curves = page.get_by_role("img", name="Training reward by update")
    curves.wait_for()
    assert curves.evaluate("picture => picture.complete && picture.naturalWidth") > 500
    browser.picture("artifact")
    link = page.get_by_role("link", name="Compare the runs in MLflow").get_attribute("href")
    assert link is not None
    page.goto(link)
    for name in ("grpo-0", "mar_grpo_bridged-0"):
        page.get_by_text(name).first.wait_for()
    browser.picture("compare")
    curve = page.locator("a[href*='metric=%22reward%22']")
    deadline = time.monotonic() + 60
    while not curve.count():  # the lists draw what is in sight
        assert time.monotonic() < deadline
        scroll = "lists => lists.forEach(list => list.scrollTop += 300)"
        page.locator(".ReactVirtualized__Grid, .mlflow-compare-table").evaluate_all(scroll)
        page.wait_for_timeout(300)
    curve.click()
    for name in ("grpo-0", "mar_grpo_bridged-0"):
        page.get_by_text(f"{name} (reward)", exact=True).wait_for()
    lines = page.locator(".js-plotly-plot .scatterlayer .trace path.js-line")
    lines.nth(1).wait_for()
    shapes = {line.get_attribute("d") for line in lines.all()}
    assert len(shapes) == 2  # one curve for each run
    browser.picture("curves")
    assert browser.outside == []


def _newest(served: Served) -> str:
    deadline = time.monotonic() + 60
    while True:
        runs = served.api("flow_runs/filter", {"sort": "START_TIME_DESC"})
        if runs:
            return str(runs[0]["id"])
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_reports_open_without_errors_or_other_hosts(project: Path, served: Served, browser: Browser) -> None:
    browser.errors.clear()
    reports = [project / "reports/report.html", *(project / "mlartifacts").rglob("report.html")]
    assert len(reports) == 2  # that of the study, and that of the sweep
    for name, report in zip(("report", "sweep_report"), reports, strict=True):
        browser.page.goto(report.as_uri())
        browser.page.get_by_role("heading", level=1).wait_for()
        browser.picture(name)
    assert browser.errors == []
    assert browser.outside == []


def test_cancelled_sweep_leaves_nothing_running(project: Path, served: Served) -> None:
    form = {"name": "cancelled", "presets": ["grpo", "mte"], "profile": "smoke", "updates": 100_000}
    run = served.start("ablation-sweep", sweep=form)
    deadline = time.monotonic() + 600
    while not list(project.glob(".margrpo/cells/cancelled-*/reports/runs/*/metrics.csv")):
        assert time.monotonic() < deadline, served.state(run)
        time.sleep(1)
    served.cancel(run)
    assert served.finish(run, 180)["type"] == "CANCELLED"
    deadline = time.monotonic() + 30
    while processes_in(project / ".margrpo/cells"):
        assert time.monotonic() < deadline, processes_in(project / ".margrpo/cells")
        time.sleep(0.5)
    deadline = time.monotonic() + 180
    while _running(project):
        assert time.monotonic() < deadline, _running(project)
        time.sleep(2)
    assert git(project, "status", "--porcelain") == ""


def _running(project: Path) -> list[str]:
    """Return the names of the runs that MLflow shows as running."""
    with closing(sqlite3.connect(project / "mlflow.db")) as store:
        return [name for (name,) in store.execute("SELECT name FROM runs WHERE status = 'RUNNING'")]
