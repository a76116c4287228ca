"""What is no snippet: links lead somewhere, the picture can be drawn, the reference is current."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from docs.make_reference import reference
from tests.docs.pages import GENERATED, PAGES, ROOT, anchors, links

PICTURES = sorted((ROOT / "docs").glob("*.svg"))
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [PAGES[0]]
    while left:
        page = left.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        left += [each for each in targets if each in PAGES and each not in reached]
    assert reached == set(PAGES)


def test_the_reference_is_what_the_code_says() -> None:
    assert GENERATED.read_text() == reference(), "run `python -m docs.make_reference`"


def test_numbers_of_the_faq_are_those_of_the_result() -> None:
    text = " ".join((ROOT / "docs" / "faq.md").read_text().split())
    with (ROOT / "docs" / "results" / "pareto-1000.csv").open() as file:
        rows = {(row["router"], row["parameter"]): row for row in csv.DictReader(file)}
    taus = ("0.3", "0.15", "0.06", "0.02", "0.0003")
    for key, name in [*((("r-stitch", tau), tau) for tau in taus), (("llm-alone", ""), "`small`")]:
        share, right = (100 * float(rows[key][each]) for each in ("llm_share", "accuracy"))
        shown = rf"\| {name}(?: alone)? \| {share:.1f}(?:\.0)? % \| {right:.1f} % \|"
        assert re.search(shown.replace("100.0", "100"), text), shown
    stored = [key for key, row in rows.items() if row["stored_default"] == "True"]
    for key in [("llm-alone", ""), *stored]:
        assert f"{float(rows[key]['tokens_per_s']):,.0f}" in text, key


def test_every_alert_has_its_advice() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    rows = re.findall(r"^\| (`Trserve.*?) \|", (ROOT / "docs" / "operate.md").read_text(), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(names)


def test_there_is_one_picture() -> None:
    assert [picture.name for picture in PICTURES] == ["request.svg"]
    assert "request.svg" in links(ROOT / "docs" / "concepts.md")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_can_be_drawn_and_read_out(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == f"{_SVG}svg" and root.get("viewBox")
    assert root.findtext(f"{_SVG}title") and root.findtext(f"{_SVG}desc")
    assert not re.search(r"(?:href|url\()[\"'(= ]*https?:", picture.read_text())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_within_its_frame_and_has_its_styles_in_light_and_dark(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    for element in root.iter():
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
        assert 0 <= x <= right <= width and 0 <= y <= bottom <= height, element.attrib
    used = {name for element in root.iter() for name in str(element.get("class", "")).split()}
    light, dark = str(root.findtext(f"{_SVG}style")).split("@media (prefers-color-scheme: dark)")
    painted = set(re.findall(r"\.([\w-]+)[^{}]*\{[^}]*#[0-9a-f]{6}", _one_by_one(light)))
    assert used <= set(re.findall(r"\.([\w-]+)", light))
    assert painted and painted <= set(re.findall(r"\.([\w-]+)", dark))


def _one_by_one(style: str) -> str:
    """Rules for several names as one rule a name."""
    return re.sub(
        r"([^{}]+)\{([^}]*)\}",
        lambda rule: "".join(f"{name}{{{rule[2]}}}\n" for name in rule[1].split(",")),
        style,
    )
