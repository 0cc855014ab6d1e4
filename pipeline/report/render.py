"""Put tables, figures and claims into report.html (self-contained) and report.md (figures linked)."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from PIL import Image

from pipeline.report.claims import Claim
from pipeline.report.lead import Lead
from pipeline.report.style import DPI
from pipeline.report.tables import Table

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Picture:
    """A figure: file name under figures/, alternative text and caption.

    A chart is drawn on white and may be inverted on a dark page; a photo shows images as they are.
    """

    file: str
    alt: str
    caption: str
    chart: bool = True
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side where the page is wide enough."""

    pictures: tuple[Picture, ...]
    kind: ClassVar[str] = "gallery"


@dataclass(frozen=True)
class ClaimList:
    """The claims with verdict, evidence and rule."""

    claims: tuple[Claim, ...]
    kind: ClassVar[str] = "claims"


@dataclass(frozen=True)
class Facts:
    """Lines of label and text."""

    items: tuple[tuple[str, str], ...]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Source:
    """A text to unfold, in the HTML alone: what it holds is a file of its own in the repository."""

    caption: str
    text: str
    kind: ClassVar[str] = "source"


Block = Table | Picture | Gallery | ClaimList | Facts | Source


@dataclass(frozen=True)
class Section:
    """A part of the report; `short` names it in the list of contents."""

    title: str
    short: str
    blocks: tuple[Block, ...]
    note: str = ""

    @property
    def anchor(self) -> str:
        """The fragment of its address."""
        return self.short.lower().replace(" ", "-")


@dataclass(frozen=True)
class Document:
    """The content of the report in reading order."""

    title: str
    question: str
    lead: Lead
    effects: Picture | None
    sections: tuple[Section, ...]


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
    environment.filters["text"] = _markdown_text
    environment.filters["breakable"] = _breakable
    environment.filters["code"] = _code
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


def _code(text: str) -> Markup:
    """Return escaped text in which what stands between backticks is code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if odd % 2 else part for odd, part in enumerate(parts)))


def _markdown_text(text: str) -> str:
    """Return text in which only backticks have a meaning."""
    parts = text.split("`")
    return "`".join(part if odd % 2 else _markdown_cell(part) for odd, part in enumerate(parts))


def _markdown_cell(text: str) -> str:
    """Return text that cannot end a cell, open a tag or start emphasis."""
    for character in "\\`*_<>[]|":
        text = text.replace(character, "\\" + character)
    return re.sub(r"[ \t\r\n]+", " ", text)
