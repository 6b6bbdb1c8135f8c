"""The page in a browser: moved with the keyboard, its numbers are the command's, and nothing leaves the file."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import lightning_zero
from lightning_zero.cli import main
from lightning_zero.planner.estimate import Estimate
from lightning_zero.planner.formulas import OPTIMIZERS, OptimizerSize
from lightning_zero.planner.page import page_of
from lightning_zero.planner.report import data_of
from lightning_zero.planner.rows import Row
from lightning_zero.precision import RECIPES

SETTINGS = [(7.5e9, 64, 80), (13e9, 4, 24), (175e9, 1024, 80)]
STAGES = range(4)


def missing(what: str) -> None:
    """Skip; but where CI is set a page that nobody opened is a failure."""
    reason = f"{what}: the page is not opened. `apt-get install chromium chromium-driver`, `pip install selenium`."
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, which logs what it prints and what it asks the network for."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing("no Chromium here" if chromium is None else "no chromedriver here")
    try:
        from selenium.webdriver import Chrome, ChromeOptions, ChromeService
    except ImportError:
        missing("no selenium here")
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = Chrome(options=options, service=ChromeService(driver))
    yield window
    window.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``opened(estimate, fragment)`` shows its page, 1200 x 1000; whatever a test does, the console stays empty."""

    def show(found: Estimate | None = None, fragment: str = "") -> Any:
        path = tmp_path / "page.html"
        if found is not None or not path.exists():
            path.write_text(page_of(found or lightning_zero.estimate(7.5e9, 64, 80, seq_len=4096)))
        browser.get("about:blank")
        browser.get(path.as_uri() + fragment)
        return browser

    emulate(browser, 1200, 1000)
    browser.get_log("browser")
    yield show
    assert browser.get_log("browser") == []


def emulate(browser: Any, width: int, height: int, scheme: str = "light") -> None:
    """A screen of this size, and a reader who prefers this scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def element(page: Any, name: str) -> Any:
    return page.find_element("id", name)


def keys(page: Any, name: str, *pressed: str) -> None:
    """Press keys in the control ``name``."""
    element(page, name).send_keys(*pressed)


def type_into(page: Any, name: str, text: Any) -> None:
    """Replace what stands in a field."""
    keys(page, name, "\ue009", "a", "\ue000")  # Control, and its release
    keys(page, name, str(text))


def choose(page: Any, name: str, option: str) -> None:
    """Go up or down a list to ``option``."""
    order = (
        "const options = [...arguments[0].options].map((o) => o.value); return [options, arguments[0].selectedIndex]"
    )
    options, at = page.execute_script(order, element(page, name))
    steps = options.index(option) - at
    keys(page, name, *["\ue015" if steps > 0 else "\ue013"] * abs(steps))


def value(page: Any, name: str) -> float:
    """The raw number that an element shows."""
    return float(element(page, name).get_attribute("data-value"))


def reason(page: Any) -> str:
    return element(page, "reason").text


def numbers(page: Any) -> dict[tuple[str, int], float]:
    """Everything that is shown for a stage; what stands in two places is equal in both."""
    cells = page.execute_script(
        "return [...document.querySelectorAll('[data-value][data-stage]')]"
        ".map((e) => [e.dataset.kind, +e.dataset.stage, +e.dataset.value])"
    )
    found: dict[tuple[str, int], float] = {}
    for kind, stage, number in cells:
        assert found.setdefault((kind, stage), number) == number
    return found


def expected(row: Row) -> dict[str, float]:
    """The same of the command, by the page's names."""
    need = row.need
    states = {kind: getattr(need.on_device, kind) for kind in ("parameters", "gradients", "optimizer")}
    found = {**states, "units": need.whole_units + need.unit_gradients, "device": need.device, "curve": need.device,
             "spare": row.spare, "sent": row.sent, "traffic": row.traffic, "seconds": row.seconds,
             "states": need.on_device.total}  # fmt: skip
    if row.disk:
        found["disk"] = row.disk
    elif row.choice.offload != "disk":
        found["host"] = row.host
    if need.activations is not None:
        found["activations"] = need.activations
    if need.paper is not None:
        found |= {"paper": need.paper.total, "difference": need.on_device.total - need.paper.total}
    return found


def close(number: float) -> Any:
    return pytest.approx(number, rel=1e-9, abs=1e-6)


def assert_shows(page: Any, *args: Any, shown: dict[str, str] | None = None, **kwargs: Any) -> None:
    """The figures of all four stages, and the recommendation to the letter."""
    found, shown = lightning_zero.estimate(*args, **kwargs), shown or {}
    asked = lightning_zero.estimate(*args, **{**kwargs, "offload": None, "activation_checkpointing": None, **shown})
    plain = lightning_zero.estimate(*args, **{**kwargs, **shown, "offload": ""})
    seen = numbers(page)
    for stage in STAGES:
        of = asked if stage else plain  # stage 0 has nothing to offload
        choice = {**shown, "offload": shown.get("offload", "") if stage else ""}
        for kind, number in expected(of.row(stage, **choice)).items():
            if stage == 0 and kind == "host" and ("host", 0) not in seen:
                continue  # the row is that of the disk
            assert seen[kind, stage] == close(number), (kind, stage)
    assert reason(page) == found.recommendation.reason
    assert element(page, "trainer").text == found.recommendation.trainer


@pytest.mark.parametrize(("params", "gpus", "memory"), SETTINGS)
def test_a_setting_that_is_typed_shows_what_the_command_says(
    opened: Callable[..., Any], params: float, gpus: int, memory: int
) -> None:
    """Bytes, seconds, sentence and line, of all four stages."""
    page = opened(lightning_zero.estimate(1e9, 2, 40))
    type_into(page, "params", f"{params / 1e9:g}B")
    type_into(page, "gpus", gpus)
    type_into(page, "gpu_memory", memory)
    for precision in ("bf16-mixed", "32-true", "bf16-true"):
        choose(page, "precision", precision)
        assert_shows(page, params, gpus, memory, precision=precision)
    type_into(page, "seq_len", 4096)
    type_into(page, "micro_batch", 2)
    assert_shows(page, params, gpus, memory, precision=precision, seq_len=4096, micro_batch=2)


@pytest.mark.parametrize(("params", "gpus", "memory"), SETTINGS)
def test_extras_show_what_the_command_says(opened: Callable[..., Any], params: float, gpus: int, memory: int) -> None:
    """Of the card and of its node; they change what is shown, not what is weighed."""
    page = opened(lightning_zero.estimate(params, gpus, memory, seq_len=2048, activation_checkpointing=""))
    keys(page, "weigh-activation_checkpointing", " ")
    choose(page, "activation_checkpointing", "full")
    choose(page, "optimizer", "momentum")
    for offload in ("cpu", "disk"):
        choose(page, "offload", offload)
        shown = {"offload": offload, "activation_checkpointing": "full"}
        assert_shows(page, params, gpus, memory, seq_len=2048, optimizer="momentum", shown=shown)


def test_arrows_move_sliders_and_fields(opened: Callable[..., Any]) -> None:
    """The slider of cards goes through powers of two, its field through every number; the stage is an arrow away."""
    up, right, left = "\ue013", "\ue014", "\ue012"
    page = opened()
    keys(page, "gpus-slider", right)
    assert_shows(page, 7.5e9, 128, 80, seq_len=4096)
    keys(page, "gpus", up)
    assert_shows(page, 7.5e9, 129, 80, seq_len=4096)
    keys(page, "gpus-slider", left, left)
    assert_shows(page, 7.5e9, 32, 80, seq_len=4096)
    keys(page, "params-slider", right)
    keys(page, "seq_len-slider", right)
    keys(page, "gpu_memory-slider", left)
    keys(page, "between-slider", left)
    assert_shows(page, 8e9, 32, 64, seq_len=8192, bandwidth="300GB/s,12.5GB/s")
    keys(page, "stage-1", right, right)
    assert element(page, "stage-3").is_selected()
    found = lightning_zero.estimate(8e9, 32, 64, seq_len=8192).row(3)
    assert value(page, "device") == close(found.need.device)


def test_the_picture_is_cut_as_the_stage_cuts(opened: Callable[..., Any]) -> None:
    """On 4 cards a shared block colors a quarter of each card, at the card's own place; the others all of it."""
    page = opened(lightning_zero.estimate(7.5e9, 4, 80, precision="32-true"))
    still = "<style>* { transition: none !important }</style>"
    page.execute_script("document.head.insertAdjacentHTML('beforeend', arguments[0])", still)
    cut = """return [...document.querySelectorAll('.card')].map(
        (card) => [...card.querySelectorAll('.state')].map((state) => {
            const whole = state.getBoundingClientRect(), part = state.firstChild.getBoundingClientRect();
            return [state.dataset.kind, (part.left - whole.left) / whole.width, part.width / whole.width]; }))"""
    kinds = ["parameters", "gradients", "optimizer"]
    for stage, shared in enumerate([[], ["optimizer"], ["gradients", "optimizer"], kinds]):
        keys(page, f"stage-{stage}", " ")
        cards = page.execute_script(cut)
        assert len(cards) == 4
        for card, blocks in enumerate(cards):
            assert [kind for kind, _, _ in blocks] == kinds
            for kind, left, width in blocks:
                at = (card / 4, 1 / 4) if kind in shared else (0, 1)
                assert (left, width) == pytest.approx(at, abs=0.01)


def test_every_control_is_reached_by_tab_has_a_name_and_shows_its_focus(opened: Callable[..., Any]) -> None:
    """A page for people without a mouse."""
    page = opened()
    controls = page.execute_script(
        "return [...document.querySelectorAll('input, select, button')]"
        ".filter((e) => e.checkVisibility() && (e.type !== 'radio' || e.checked)).length"
    )
    outline = """const e = document.activeElement, seen = e.type === 'radio' ? e.closest('fieldset') : e;
        return [e.tagName, e.id || e.textContent, getComputedStyle(seen).outlineStyle]"""
    reached = {}
    for _ in range(controls + 4):  # and links
        page.switch_to.active_element.send_keys("\ue004")
        tag, name, style = page.execute_script(outline)
        if tag in ("INPUT", "SELECT", "BUTTON"):
            reached[name] = style, page.switch_to.active_element.accessible_name
    assert len(reached) == controls
    assert all(style != "none" and name for style, name in reached.values()), reached
    live = element(page, "reason").find_element("xpath", "..")
    assert live.get_attribute("aria-live") == "polite"


def test_what_is_not_understood_says_what_to_type(opened: Callable[..., Any]) -> None:
    """And changes no figure; leaving nodes that do not divide the cards is the command's own error."""
    page = opened()
    before = numbers(page)
    type_into(page, "params", "seven")
    assert element(page, "params").get_attribute("aria-invalid") == "true"
    assert "Write 7.5B" in element(page, "params-hint").text
    type_into(page, "gpus", "0")
    assert "from 1 to" in element(page, "gpus-hint").text
    assert numbers(page) == before
    type_into(page, "nodes", 7)
    with pytest.raises(lightning_zero.PlanError) as error:
        lightning_zero.estimate(7.5e9, 64, 80, nodes=7)
    assert reason(page) == str(error.value)
    type_into(page, "nodes", 4)
    assert_shows(page, 7.5e9, 64, 80, seq_len=4096, nodes=4)


def random_question(rng: random.Random) -> dict[str, Any]:
    """Of any size, from what fits on one card to what fits nowhere."""
    gpus = rng.choice([1, 2, 4, 6, 8, 9, 16, 24, 64, 100, 512, 1024, 4096])
    stage = rng.choice([None, None, None, 0, 1, 2, 3])
    nodes = rng.choice([None, None, *(n for n in (1, 2, 3, 4) if gpus % n == 0)])
    return {
        "params": float(round(10 ** rng.uniform(7, 12.3))),
        "gpus": gpus,
        "gpu_memory": rng.choice([8e9, 24e9, 80e9, 80 * 2**30, 141e9]),
        "precision": rng.choice(list(RECIPES)),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "stage": stage,
        "offload": rng.choice([None, None, ""] + ["cpu", "disk"] * (stage != 0)),
        "activation_checkpointing": rng.choice([None, None, "", "full"]),
        "micro_batch": rng.choice([1, 1, 3, 16]),
        "seq_len": rng.choice([None, 512, 4096, 131072]),
        "accumulate": rng.choice([1, 1, 4]),
        "nodes": nodes,
        "bandwidth": rng.choice([(300e9, 25e9), (900e9, 50e9), (1e9, 1e9)]),
    }


def test_the_pages_plan_is_the_commands(opened: Callable[..., Any]) -> None:
    """For 150 questions of any kind: rows in their order, which one is taken, its sentence and its line."""
    rng = random.Random(0)
    questions = [random_question(rng) for _ in range(150)]
    plans = opened().execute_script(
        "return arguments[0].map((question) => { const { rows, recommendation: r } = plan(question);"
        " return { rows, row: r.row, gpus: r.asked.gpus, reason: r.reason, trainer: r.trainer }; })",
        questions,
    )
    kinds = {"none", "more", "here"}
    for question, seen in zip(questions, plans):
        found = lightning_zero.estimate(**question)
        assert len(seen["rows"]) == len(found.rows)
        for one, row in zip(seen["rows"], found.rows):
            need, its = row.need, one["need"]
            assert one["choice"] == asdict(row.choice)
            pairs = [
                (its["device"], need.device), (its["wholeUnits"], need.whole_units),
                (its["unitGradients"], need.unit_gradients), (its["activations"], need.activations),
                (one["sent"], row.sent), (one["seconds"], row.seconds), (one["traffic"], row.traffic),
                (one["host"], row.host), (one["disk"], row.disk), (one["spare"], row.spare),
            ]  # fmt: skip
            for number, theirs in pairs:
                assert (number is None) == (theirs is None)
                assert number is None or number == pytest.approx(theirs, rel=1e-9, abs=1e-9 * need.device), question
            assert one["fits"] == row.fits
        best = found.recommendation
        assert (seen["gpus"], seen["reason"], seen["trainer"]) == (best.gpus, best.reason, best.trainer), question
        kinds.discard("none" if best.row is None else "here" if best.gpus == question["gpus"] else "more")
    assert not kinds, "the questions have all three outcomes"


def test_numbers_are_written_as_python_writes_them(opened: Callable[..., Any]) -> None:
    """Ties go to the even digit: 0.25 is 0.2."""
    rng = random.Random(1)
    values = [0.25, 0.75, 2.5, 1234.5, 12345.0, 123.25, 0.05, 1e6, 0.0, -0.25, -1234.5, 99999.5, 1e-5]
    values += [round(rng.uniform(-9, 9) * 10 ** rng.randint(-3, 6), rng.randint(0, 6)) + 0.0 for _ in range(200)]
    script = "return arguments[0].map((v) => [fixed(v, 0), fixed(v, 1), fixed(v, 3), v > 0 ? general(v) : ''])"
    for number, seen in zip(values, opened().execute_script(script, values)):
        wanted = [f"{number:,.0f}", f"{number:,.1f}", f"{number:,.3f}", f"{number:,.4g}" if number > 0 else ""]
        assert seen == wanted


def test_the_command_that_the_page_shows_says_the_same(
    opened: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell would read it, with nothing weighed that the page does not weigh."""
    page = opened()
    keys(page, "params", "\ue009", "a", "\ue000", "1.3B")
    type_into(page, "within", 450)
    type_into(page, "accumulate", 4)
    choose(page, "offload", "cpu")
    keys(page, "stage-3", " ")
    keys(page, "weigh-offload", " ")
    keys(page, "weigh-stage", " ")
    program, *arguments = shlex.split(element(page, "command").text)
    assert program == "lightning-zero"
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {row["choice"]["stage"] for row in said["rows"]} == {3}
    assert {row["choice"]["offload"] for row in said["rows"]} == {"cpu"}
    assert said["rows"][0]["device"] == close(value(page, "device"))
    assert said["recommendation"]["reason"] == reason(page)
    assert said["recommendation"]["trainer"] == element(page, "trainer").text


def test_the_command_writes_a_page_that_is_set_to_its_question(
    browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every option that it was given."""
    path = tmp_path / "page.html"
    options = (
        "--params 13B --gpus 12 --gpu-memory 24GiB --stage 2 --offload cpu --seq-len 1000 --accumulate 3 --nodes 2"
    )
    assert main(["estimate", *options.split(), "--json", "--html", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    browser.get(path.as_uri())
    assert reason(browser) == said["recommendation"]["reason"]
    assert element(browser, "stage-2").is_selected()
    assert f"--gpu-memory {24 * 2**30}" in element(browser, "command").text.replace("25.769803776GB", str(24 * 2**30))
    assert main(["page", "--html", str(path)]) == 0
    browser.get(path.as_uri())
    assert reason(browser) == lightning_zero.estimate(7.5e9, 64, 80, seq_len=4096).recommendation.reason


def test_a_title_ends_no_script() -> None:
    """A folder may be called anything."""
    found = lightning_zero.estimate(1e9, 2, 40)

    class Named:
        numel, title = 1e9, "</script><b>"

    text = page_of(replace(found, subject=Named()))  # type: ignore[arg-type]
    assert "</script><b>" not in text and "\\u003c/script>\\u003cb>" not in text.split("const START")[0]
    assert text.isascii()


def test_the_recommendation_can_be_shown(opened: Callable[..., Any]) -> None:
    """One key sets the page to it, on more cards where it says so."""
    page = opened(lightning_zero.estimate(175e9, 8, 24, seq_len=512))
    best = lightning_zero.estimate(175e9, 8, 24, seq_len=512).recommendation
    assert best.row is not None and best.gpus > 8
    page.execute_script("document.getElementById('stage-0').click()")
    keys(page, "show", "\ue007")
    assert value(page, "device") == close(best.row.need.device)
    assert element(page, "gpus").get_attribute("value") == str(best.gpus)
    assert not element(page, "show").is_displayed()


def test_misunderstandings_are_answered_with_the_settings_numbers(opened: Callable[..., Any]) -> None:
    """Each number is the command's."""
    page = opened(lightning_zero.estimate(13e9, 32, 80, seq_len=2048, bandwidth=(300e9, 12.5e9)))
    found = lightning_zero.estimate(13e9, 32, 80, seq_len=2048, bandwidth=(300e9, 12.5e9))
    twice = lightning_zero.estimate(13e9, 32, 80, seq_len=4096)
    keys(page, "stage-2", " ")
    plain, second, third = found.row(0), found.row(2), found.row(3)
    for name, number in {
        "stored": second.need.on_device.total,
        "stored-part": second.need.on_device.total / plain.need.on_device.total,
        "computed": 13e9,
        "model-parallel": 13e9 / 32,
        "gathered": third.need.gathered,
        "third-traffic": 1.5,
        "extra-seconds": third.seconds - second.seconds,
        "kept": second.need.activations,
        "kept-twice": twice.row(2).need.activations,
        "recomputed": found.row(2, activation_checkpointing="full").need.activations,
        "third-states": third.need.on_device.total,
        "far-states": lightning_zero.estimate(13e9, 4096, 80).row(3).need.on_device.total,
        "saved": plain.need.device - second.need.device,
        **{f"myth-seconds-{stage}": found.row(stage).seconds for stage in STAGES},
    }.items():
        assert number is not None and value(page, name) == close(number), name


def test_a_coefficient_moves_the_page_and_the_command(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read one table: a third moment of AdamW is 4 bytes a parameter more, on the page as in the command."""
    before = numbers(opened())
    monkeypatch.setitem(OPTIMIZERS, "adamw", OptimizerSize(3))
    found = lightning_zero.estimate(7.5e9, 64, 80, seq_len=4096)
    page = opened(found)
    assert_shows(page, 7.5e9, 64, 80, seq_len=4096)
    after = numbers(page)
    for stage in STAGES:
        more = 4 * 7.5e9 / (64 if stage else 1)
        for kind in ("optimizer", "device", "states", "paper"):
            assert after[kind, stage] - before[kind, stage] == pytest.approx(more, rel=1e-6)
    assert data_of(found.subject, found.question, found.rows, found.recommendation)["rows"][0]["device"] == close(
        after["device", 0]
    )


def test_the_address_holds_the_setting(opened: Callable[..., Any]) -> None:
    """Whoever opens it sees the same figures; what makes no sense in it is passed over."""
    page = opened()
    type_into(page, "gpus", 48)
    choose(page, "precision", "32-true")
    choose(page, "offload", "cpu")
    keys(page, "weigh-activation_checkpointing", " ")
    before, sentence = numbers(page), reason(page)
    time.sleep(0.3)  # changes are collected for 0.2 seconds
    fragment = "#" + page.current_url.split("#")[1]
    opened(fragment=fragment)
    assert (numbers(page), reason(page)) == (before, sentence)
    opened(fragment="#params=-3&gpus=2.5&precision=none&stage=9&offload=moon&gpu_memory=&__proto__=1")
    assert_shows(page, 7.5e9, 64, 80, seq_len=4096)


def test_no_request_leaves_the_file(opened: Callable[..., Any]) -> None:
    """Not on opening, and not while it is used; the browser is told to refuse what would."""
    page = opened()
    page.get_log("performance")
    opened(lightning_zero.estimate(13e9, 4, 24))
    for name in ("params-slider", "gpus-slider", "stage-2"):
        keys(page, name, "\ue014")
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert asked - {"data:,", "about:blank"} == {page.current_url.split("#")[0]}
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    refused = """const done = arguments[0];
        addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
        setTimeout(() => done('nothing'), 3000);
        fetch('http://127.0.0.1:9/').catch(() => {});"""
    assert page.execute_async_script(refused) == "connect-src"
    page.get_log("browser")  # the refusal is printed


@pytest.mark.parametrize("fragment", ["", "#params=175e9&gpus=1024&stage=3&offload=cpu&seq_len=1048576", "#gpus=1"])
def test_a_phone_reads_one_column(opened: Callable[..., Any], fragment: str) -> None:
    """375 pixels: nothing to scroll sideways, controls above figures; on a screen they are side by side."""
    page = opened(fragment=fragment)
    places = "return ['controls', 'advice'].map((id) => document.getElementById(id).getBoundingClientRect().left)"
    left, right = page.execute_script(places)
    assert right > left + 200
    emulate(page, 375, 800)
    width, shown = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width == shown == 375
    assert len(set(page.execute_script(places))) == 1
    clipped = page.execute_script(
        "return [...document.querySelectorAll('.number, label, td, th')]"
        ".filter((e) => e.getBoundingClientRect().right > 375.5).length"
    )
    assert clipped == 0


def test_the_dark_is_dark(opened: Callable[..., Any]) -> None:
    """Ink and paper change places for who prefers it."""
    page = opened()
    colors = """const style = getComputedStyle(document.body), mean = (color) =>
            color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;
        return [mean(style.backgroundColor), mean(style.color)]"""
    paper, ink = page.execute_script(colors)
    assert paper > 230 and ink < 60
    emulate(page, 1200, 1000, "dark")
    paper, ink = page.execute_script(colors)
    assert paper < 60 and ink > 200
