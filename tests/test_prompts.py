from __future__ import annotations

from pathlib import Path

import pytest

from margrpo.benchmarks.scenes import load_split
from margrpo.errors import ConfigError
from margrpo.prompts import Prompt, dump_prompts, load_splits, read_prompts
from margrpo.sources import Prompts


def write(folder: Path, **files: str) -> Prompts:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return Prompts(source="path", path=str(folder))


def test_text_and_json_files(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        train_txt="a red cube\n\n  two dogs  \n",
        validation_jsonl='{"text": "a cat", "category": "animals"}\n{"text": "two dogs", "seen": false}\n',
        test_txt="a red cube\na blue ball\n",
    )
    splits = load_splits(source)
    assert splits["train"] == [Prompt(text, "prompts", {}, True) for text in ("a red cube", "two dogs")]
    assert splits["validation"] == [
        Prompt("a cat", "animals", {}, False),
        Prompt("two dogs", "prompts", {}, False),
    ]
    assert [prompt.seen for prompt in splits["test"]] == [True, False]
    (tmp_path / "written.jsonl").write_text(dump_prompts(splits["test"]))
    assert read_prompts(tmp_path / "written.jsonl") == splits["test"]


def test_the_embedded_prompts() -> None:
    splits = load_splits(Prompts())
    assert [p.text for p in splits["test"]] == [p.text for p in load_split("test")]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"train_txt": "a\n", "test_txt": "b\n"}, "with no validation; allowed: .*one of validation.txt"),
        ({"train_txt": "a\n", "train_jsonl": "{}"}, "train.txt and train.jsonl"),
        ({"train_txt": "a\n", "validation_txt": "\n", "test_txt": "b\n"}, "at least one prompt"),
        ({"train_txt": "a\n", "validation_jsonl": "[1]\n", "test_txt": "b\n"}, "validation.jsonl line 1"),
        ({"train_txt": "a\n", "validation_jsonl": '{"text": 3}', "test_txt": "b\n"}, "empty or no text"),
        ({"train_txt": "a\n", "validation_txt": "b\n", "test_txt": "b\n"}, "either validation or test"),
    ],
)
def test_mistakes_in_a_folder(files: dict[str, str], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        load_splits(write(tmp_path, **files))
