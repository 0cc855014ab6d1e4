"""Where a NOVA policy finds its frozen text encoder, tokenizer and autoencoder, which saved policies do not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from margrpo.checkpoints import sha256
from margrpo.errors import MargrpoError

PARTS = ("text_encoder", "tokenizer", "vae")
_HASHED = ("text_encoder/config.json", "tokenizer/tokenizer.json", "vae/config.json")
Finder = Callable[[], Path | None]


class Parts:
    """Folders of the frozen parts, looked for when the first one is needed.

    A saved policy names no place, so that it can be moved: it holds marks of the parts (hashes of their small
    files, sizes of their weight files), and any folder with these parts will do.

    Args:
        marks: as `marks_of` returned them; empty accepts any folder.
    """

    def __init__(self, marks: Mapping[str, str]) -> None:
        self.marks = dict(marks)
        self._finders: list[Finder] = []
        self._found: Path | None = None

    def look(self, find: Finder) -> None:
        """Look there first; `find` may also return None."""
        self._finders.insert(0, find)
        self._found = None

    def folder(self, name: str) -> Path:
        """Return the folder of a part.

        Raises:
            MargrpoError: no known place has it, or it is not the one that the policy was made with.
        """
        if self._found is None or not (self._found / name).is_dir():
            self._found = self._search(name)
        return self._found / name

    def _search(self, name: str) -> Path:
        tried = []
        for find in self._finders:
            place = find()
            if place is None:
                continue
            if (place / name).is_dir():
                self._check(place)
                return place
            tried.append(str(place))
        raise MargrpoError(
            f"{' and '.join(tried) or 'no folder'}: no {name}; a NOVA policy encodes prompts and decodes images with "
            f"{', '.join(PARTS)} of the released checkpoint: name it in checkpoint.path or checkpoint.id of the "
            "params, or put these folders beside the policy's file"
        )

    def _check(self, place: Path) -> None:
        given = marks_of(place)
        for name, mark in self.marks.items():
            if given.get(name, mark) != mark:
                raise MargrpoError(
                    f"{place / name}: is {given[name]}; allowed: {mark}, the released checkpoint that the policy was "
                    "made from (checkpoint.path or checkpoint.id of the params)"
                )


def marks_of(folder: Path) -> dict[str, str]:
    """Return what tells the parts in a folder from others: hashes of small files, sizes of weight files."""
    marks = {name: f"sha256 {sha256(folder / name)}" for name in _HASHED if (folder / name).is_file()}
    for name in PARTS:
        for file in sorted((folder / name).glob("*.safetensors")):
            marks[f"{name}/{file.name}"] = f"{file.stat().st_size} bytes"
    return marks
