"""Put tables, figures and claims into report.html (self-contained) and report.md (figures linked)."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from PIL import Image

from pipeline.report.claims import Claim
from pipeline.report.figures import DPI
from pipeline.report.tables import Table

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Picture:
    """A figure: file name under figures/, alternative text and caption."""

    file: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Document:
    """The content of the report in reading order."""

    title: str
    question: str
    answers: list[str]
    headline: Picture
    variants: Table
    comparisons: list[Table]
    claims: list[Claim]
    curves: list[Picture]
    scatter: Picture
    samples: list[Picture]
    samples_note: str
    sample_prompts: Table
    details: Table
    within_runs: Table
    benchmarks: list[Table]
    setting: list[tuple[str, str]]


def render(document: Document, figures: Path) -> tuple[str, str]:
    """Return the report as HTML, with the images of the folder `figures` inline, and as Markdown."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _markdown_cell
    environment.filters["breakable"] = _breakable
    environment.globals["inline"] = lambda picture: _inline(figures / picture.file)
    environment.globals["width"] = lambda picture: _width(figures / picture.file)
    html = environment.get_template("report.html").render(document=document)
    markdown = environment.get_template("report.md").render(document=document)
    return html, markdown


def _inline(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _width(path: Path) -> int:
    """Return the width in CSS pixels (96 an inch) at which text in a figure has the size it was drawn for."""
    with Image.open(path) as image:
        return round(image.width * 96 / DPI)


def _breakable(text: str) -> Markup:
    """Return escaped text in which a narrow screen may break names after an underscore."""
    return Markup(str(escape(text)).replace("_", "_<wbr>"))


def _markdown_cell(text: str) -> str:
    """Return text that cannot end a cell, open a tag or start emphasis."""
    for character in "\\`*_<>[]|":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
