"""Which files below a folder are the splits of a text: WikiText, Penn Treebank, plain text."""

from pathlib import Path

from mprun.data.errors import DamagedData

_PATTERNS = ("wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt", "{}.tokens")
_NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


def find_text_files(root: str | Path, splits: tuple[str, ...]) -> dict[str, Path]:
    """The one file of each of ``splits`` ("train", "valid", "test") in the folder ``root``.

    Raises ``DamagedData`` where a split has no file or several, and where the files are named
    after different patterns, which may be different texts.
    """
    root = Path(root)
    try:
        present = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    except OSError as error:
        raise DamagedData(f"{root}: {error.strerror}") from error
    found = {split: _one(root, split, present) for split in splits}
    patterns = {_pattern(path.name, split) for split, path in found.items()}
    if len(patterns) > 1:
        names = " and ".join(path.name for path in found.values())
        raise DamagedData(f"{root}: {names} are named as parts of different texts")
    return found


def _one(root: Path, split: str, present: list[str]) -> Path:
    candidates = [name for name in present if _pattern(name, split) is not None]
    if len(candidates) == 1:
        return root / candidates[0]
    wanted = ", ".join(pattern.format(split) for pattern in _PATTERNS)
    if candidates:
        raise DamagedData(
            f"{root}: several files of the {split} split, leave one: {', '.join(candidates)}"
        )
    others = ", ".join(_NAMES[split][1:])
    also = f" (or {others} for {split})" if others else ""
    listed = ", ".join(present[:5]) + (", ..." if len(present) > 5 else "")
    raise DamagedData(
        f"{root}: no {split} split, which is one of {wanted}{also}; found {listed or 'no file'}"
    )


def _pattern(name: str, split: str) -> str | None:
    """The pattern of which ``name`` is the file of ``split``, or None."""
    return next((p for p in _PATTERNS for alias in _NAMES[split] if p.format(alias) == name), None)
