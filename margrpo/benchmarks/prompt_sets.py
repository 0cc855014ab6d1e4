"""Prompts of published benchmarks, read from local copies of their own files; none comes with this package.

Every loader checks the number of prompts of each category, so that a partial copy cannot pass for the
benchmark, and says which file is missing and where it comes from.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from margrpo.errors import ConfigError
from margrpo.prompts import OWN, Prompt, dump_prompts, read_prompts

HPS_STYLES = ("anime", "concept-art", "paintings", "photo")
T2I_CATEGORIES = (
    "color",
    "shape",
    "texture",
    "spatial",
    "3d_spatial",
    "numeracy",
    "non_spatial",
    "complex",
)
_T2I_SHA256 = {
    "color": "1634259756dbc77d",
    "shape": "37e1a276906c7ea9",
    "texture": "fbb5363515b4a280",
    "spatial": "8707a1d7e42ce300",
    "3d_spatial": "c9953597315f36a5",
    "numeracy": "dad8df141604b70b",
    "non_spatial": "04c56cc9ac441dc9",
    "complex": "1b808018b8d9916d",
}
"""First 16 digits of the sha256 of the official `<category>_val.txt`."""
_GENEVAL_COUNTS = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}

_log = logging.getLogger("margrpo.benchmarks")


@dataclass(frozen=True)
class PromptSet:
    """A benchmark's prompts, how many images each gets, and the number of prompts of each category.

    Attributes:
        files: patterns of the names of its files, for a download. rules: kinds of scores that are defined for
            some of its categories only. mean_of_categories: its total is that, not the mean over prompts.
    """

    name: str
    source: str
    license: str
    images_per_prompt: int
    counts: Mapping[str, int]
    read: Callable[[Path], list[Prompt]]
    files: tuple[str, ...] = ()
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean_of_categories: bool = False

    def has(self, score: str, category: str) -> bool:
        """Return whether a score is defined for a category; the detector in its name does not matter."""
        return category in self.rules.get(score.partition(".")[0], (category,))


def load(name: str, folder: Path) -> list[Prompt]:
    """Return the prompts of a benchmark from a folder that holds its files, in the official order.

    Raises:
        ConfigError: unknown benchmark, missing or malformed file, or another number of prompts than the
            benchmark has.
    """
    if name not in SETS:
        raise ConfigError.of("benchmark", repr(name), f"allowed: {', '.join(SETS)}")
    chosen = SETS[name]
    prompts = chosen.read(folder)
    found: dict[str, int] = {}
    for prompt in prompts:
        found[prompt.category] = found.get(prompt.category, 0) + 1
    wanted = chosen.counts or found
    if found != wanted and ("all" not in wanted or len(prompts) != wanted["all"]):
        raise ConfigError.of(
            f"benchmark {name}", f"{folder} has {found}", f"allowed: {dict(wanted)} (from {chosen.source})"
        )
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the sha256 of prompts as they are read: order, text, category and metadata, not the file's form."""
    return hashlib.sha256(dump_prompts(prompts).encode()).hexdigest()


def _file(path: Path) -> list[Prompt]:
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise ConfigError.of("benchmark file", path, "allowed: a .txt (a prompt per line) or .jsonl file")
    return read_prompts(path, OWN)


def _hpsv2(folder: Path) -> list[Prompt]:
    prompts = []
    for style in HPS_STYLES:
        path = _find(folder, (f"benchmark/{style}.json", f"{style}.json"), "zhwang/HPDv2")
        texts = _json(path)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ConfigError.of("benchmark hpsv2", path, "allowed: a JSON list of prompts")
        prompts += [Prompt(text, style, {}, False) for text in texts]
    return prompts


def _drawbench(folder: Path) -> list[Prompt]:
    path = _find(folder, ("DrawBench.csv", "drawbench.csv"), "a copy of Imagen's DrawBench sheet")
    return [
        Prompt(row["Prompts"], row["Category"], {}, False) for row in _table(path, ",", "Prompts", "Category")
    ]


def _parti(folder: Path) -> list[Prompt]:
    path = _find(folder, ("PartiPrompts.tsv",), "google-research/parti")
    rows = _table(path, "\t", "Prompt", "Category", "Challenge")
    return [Prompt(row["Prompt"], row["Category"], {"challenge": row["Challenge"]}, False) for row in rows]


def _geneval(folder: Path) -> list[Prompt]:
    names = ("prompts/evaluation_metadata.jsonl", "evaluation_metadata.jsonl")
    path = _find(folder, names, "djghosh13/geneval")
    prompts = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            spec = json.loads(line)
            prompts.append(Prompt(spec["prompt"], spec["tag"], spec, False))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError.of(
                "benchmark geneval", f"{path} line {number}", f"allowed: a metadata line ({error!r})"
            ) from None
    return prompts


def _image_reward(folder: Path) -> list[Prompt]:
    path = _find(
        folder, ("benchmark/benchmark-prompts.json", "benchmark-prompts.json"), "zai-org/ImageReward"
    )
    try:
        return [Prompt(item["prompt"], "all", {"id": item["id"]}, False) for item in _json(path)]
    except (KeyError, TypeError) as error:
        raise ConfigError.of(
            "benchmark image_reward", path, f"allowed: a JSON list of id and prompt ({error!r})"
        ) from None


def _ocr(folder: Path) -> list[Prompt]:
    path = _find(folder, ("dataset/ocr/test.txt", "ocr/test.txt", "test.txt"), "yifan123/flow_grpo")
    return [Prompt(line, "all", {}, False) for line in _lines(path)]


def _t2i(folder: Path) -> list[Prompt]:
    """Read the eight validation lists; `prompt_parse_val.json` beside them, if there, gives the specs."""
    parsed_path = folder / "prompt_parse_val.json"
    parsed = _json(parsed_path) if parsed_path.is_file() else {}
    prompts = []
    for category in T2I_CATEGORIES:
        names = (f"examples/dataset/{category}_val.txt", f"{category}_val.txt")
        path = _find(folder, names, "Karine-Huang/T2I-CompBench")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if not digest.startswith(_T2I_SHA256[category]):
            _log.warning("margrpo: %s differs from the official file (sha256 %s)", path, digest[:16])
        seen_path = path.with_name(f"{category}_val_seen.txt")
        seen = set(_lines(seen_path)) if seen_path.is_file() else set()
        specs = {item["prompt"]: item for item in parsed.get(category, [])}
        prompts += [Prompt(line, category, specs.get(line, {}), line in seen) for line in _lines(path)]
    return prompts


def _find(folder: Path, names: tuple[str, ...], source: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError.of(
        "benchmark", f"{folder} has no {names[-1]}", f"allowed: a folder with it (from {source})"
    )


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("benchmark", path, f"allowed: a readable UTF-8 file ({error})") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError.of("benchmark", path, f"allowed: a readable JSON file ({error})") from None


def _table(path: Path, delimiter: str, *columns: str) -> list[dict[str, str]]:
    text = path.read_text(encoding="utf-8-sig")
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    missing = [column for column in columns if column not in (reader.fieldnames or [])]
    if missing:
        raise ConfigError.of("benchmark", path, f"allowed: a table with the columns {', '.join(columns)}")
    return [row for row in reader if row[columns[0]]]


_T2I_RULES = {
    "t2i_attribute": ("color", "shape", "texture"),
    "t2i_spatial": ("spatial",),
    "t2i_3d_spatial": ("3d_spatial",),
    "t2i_numeracy": ("numeracy",),
}
_SHEET, _PARTI = "the Imagen paper's sheet", "google-research/parti"
_REWARD, _T2I = "zai-org/ImageReward", "Karine-Huang/T2I-CompBench"
_STYLES, _CATEGORIES = dict.fromkeys(HPS_STYLES, 800), dict.fromkeys(T2I_CATEGORIES, 300)
_HPS_FILES = tuple(f"*{style}.json" for style in HPS_STYLES)
_T2I_FILES = ("*_val.txt", "*_val_seen.txt", "*prompt_parse_val.json")
SETS = {
    item.name: item
    for item in (
        PromptSet("hpsv2", "zhwang/HPDv2", "Apache-2.0", 1, _STYLES, _hpsv2, _HPS_FILES),
        PromptSet("drawbench", _SHEET, "none stated", 1, {"all": 200}, _drawbench, ("*[dD]raw[bB]ench.csv",)),
        PromptSet("partiprompts", _PARTI, "Apache-2.0", 1, {"all": 1632}, _parti, ("*PartiPrompts.tsv",)),
        PromptSet(
            "geneval",
            "djghosh13/geneval",
            "MIT",
            4,
            _GENEVAL_COUNTS,
            _geneval,
            ("*evaluation_metadata.jsonl",),
            mean_of_categories=True,
        ),
        PromptSet(
            "image_reward", _REWARD, "Apache-2.0", 10, {"all": 100}, _image_reward, ("*-prompts.json",)
        ),
        PromptSet("ocr", "yifan123/flow_grpo", "MIT", 1, {"all": 1018}, _ocr, ("*test.txt",)),
        PromptSet("t2i_compbench", _T2I, "MIT", 10, _CATEGORIES, _t2i, _T2I_FILES, _T2I_RULES),
        PromptSet("file", "your own .txt or .jsonl", "yours", 1, {}, _file),
    )
}
"""The benchmarks whose prompts can be read."""
