"""Recorded speech as log spectrograms: audio files and texts, in manifests or as LibriSpeech."""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mprun.data.image_files import printable
from mprun.data.loader import LoadedSource
from mprun.data.source import DamagedData, DataError, ReadBatch, Reader, Serving, reading
from mprun.errors import BadInput
from mprun.extensions.speech.audio import Spectrogram, read_audio, seconds_of

_SPLITS = {"train": ("train",), "eval": ("dev", "val", "valid", "validation")}
_ENDINGS = (".json", ".jsonl", ".csv")
_FOLDERS = {"train": "train-*", "eval": "dev-*"}  # of LibriSpeech (Panayotov et al., ICASSP 2015)
# The names of NeMo and deepspeech.pytorch, and for CSV headers those of DeepSpeech too.
_COLUMNS = {
    "audio_filepath": ("audio_filepath", "wav_filename"),
    "text": ("text", "transcript"),
    "duration": ("duration",),
}


class Utterance(NamedTuple):
    """A line of a manifest, which `where` names; `seconds` is None if the line has no duration."""

    audio: str
    text: str
    seconds: float | None
    where: str

    @property
    def length(self) -> float:
        """Return the seconds that its line or, without them, its file has."""
        return seconds_of(self.audio) if self.seconds is None else self.seconds


def read_manifest(path: str) -> list[Utterance]:
    """Read the lines of a manifest, JSON or (by its ending) CSV; DamagedData names a line."""
    shown = printable(path)
    try:
        with (
            reading(f"{shown}: cannot be read"),
            open(path, encoding="utf-8-sig", newline="") as file,
        ):
            content = file.read()
    except UnicodeDecodeError as error:
        raise DamagedData(f"{shown}: must be UTF-8 text (invalid at byte {error.start})") from error
    rows = _csv_rows if path.lower().endswith(".csv") else _json_rows
    folder = os.path.dirname(path)
    found = [_utterance(row, folder, where) for row, where in rows(content, shown)]
    if not found:
        raise DamagedData(f"{shown}: lists no utterances")
    return found


def read_transcripts(folder: str) -> list[Utterance]:
    """Read the texts below a folder of LibriSpeech: lines `ID TEXT`, beside their `ID.flac`.

    They are in the order of their files' paths, which is that of the IDs.
    """
    found = []
    for path in sorted(Path(folder).rglob("*.trans.txt")):
        shown, beside = printable(str(path)), str(path.parent)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DamagedData(f"{shown}: cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            name, _, text = line.partition(" ")
            where = f"{shown}:{number}"
            if not name or "/" in name or "\0" in line:
                raise DamagedData(f"{where}: must be the name of an utterance and its text")
            audio = os.path.join(beside, f"{name}.flac")
            found.append(Utterance(audio, " ".join(text.split()), None, where))
    if not found:
        raise DamagedData(f"{printable(folder)}: has no *.trans.txt with an utterance")
    return found


def _json_rows(content: str, shown: str) -> Iterator[tuple[dict, str]]:
    for number, line in enumerate(content.split("\n"), start=1):
        where = f"{shown}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DamagedData(f"{where}: is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DamagedData(f"{where}: is a {type(row).__name__}, must be an object")
        yield row, where


def _csv_rows(content: str, shown: str) -> Iterator[tuple[dict, str]]:
    reader = csv.DictReader(io.StringIO(content, newline=""))
    try:
        for row in reader:
            yield row, f"{shown}:{reader.line_num}"
    except csv.Error as error:
        raise DamagedData(f"{shown}:{reader.line_num}: is not CSV: {error}") from error


def _utterance(row: dict, folder: str, where: str) -> Utterance:
    audio, text, duration = (
        next((row[name] for name in names if row.get(name) is not None), None)
        for names in _COLUMNS.values()
    )
    for key, value in (("audio_filepath", audio), ("text", text)):
        if not isinstance(value, str) or "\0" in value:
            raise DamagedData(f"{where}: has no {key}")
    try:
        os.fsencode(str(audio))
    except UnicodeEncodeError:  # JSON may hold half a character
        raise DamagedData(f"{where}: audio_filepath={audio!r} must be the name of a file") from None
    try:
        seconds = None if duration is None else float(duration)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if seconds is not None and not math.isfinite(seconds):
        shown = printable(repr(duration)[:40])
        raise DamagedData(f"{where}: duration={shown} must be a number of seconds")
    words = " ".join(str(text).split())
    return Utterance(os.path.join(folder, str(audio)), words, seconds, where)


class UtteranceReader(Reader):
    """Batches of utterances; `codes` has the symbol of each character, from 1.

    Features are float32 `[n, 1, frequencies, longest]`, zero after each utterance. Targets are
    int64 `[n, 2 + most symbols]`: frames, length of the text, its symbols.
    """

    def __init__(
        self,
        spectrogram: Spectrogram,
        codes: dict[str, int],
        where: str,
        batch_size: int,
        utterances: Sequence[Utterance],
        seed: int | None,
    ) -> None:
        super().__init__(len(utterances), where, batch_size, seed)
        self.utterances, self.spectrogram, self.codes = utterances, spectrogram, codes

    def read(self, number: int) -> ReadBatch:
        chosen = [self.utterances[place] for place in self.places(number)]
        rate = self.spectrogram.sample_rate
        spectra = [self.spectrogram.of(read_audio(one.audio, rate)) for one in chosen]
        longest = max(spectrum.shape[1] for spectrum in spectra)
        features = torch.zeros(len(chosen), 1, self.spectrogram.frequencies, longest)
        targets = torch.zeros(len(chosen), 2 + max(len(one.text) for one in chosen)).long()
        parts = zip(features.numpy(), targets, chosen, spectra, strict=True)
        for row, target, one, spectrum in parts:
            row[0, :, : spectrum.shape[1]] = spectrum
            symbols = [self.codes[character] for character in one.text]
            target[: 2 + len(symbols)] = torch.tensor([spectrum.shape[1], len(symbols), *symbols])
        return ReadBatch(features, targets, {})


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The characters of the texts, or the file below root that has them, one a line."""

    alphabet: str
    alphabet_file: str | None
    lower: bool  # texts are turned to lower case

    def characters(self, root: str) -> str:
        """Return the characters; raise ValueError if there is none, or one of them twice."""
        key, found = f"alphabet={self.alphabet!r}", self.alphabet
        if self.alphabet_file is not None:
            key, found = f"alphabet_file={self.alphabet_file}", ""
            try:
                with open(os.path.join(root, self.alphabet_file), encoding="utf-8") as file:
                    lines = [line.rstrip("\r\n") for line in file]
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{key}: cannot be read: {error}") from error
            for number, line in enumerate(lines, start=1):
                if len(line) != 1:
                    count = len(line)
                    raise ValueError(f"{key}: line {number} has {count} characters, must have one")
                found += line
        if not found:
            raise ValueError(f"{key}: contains no character")
        for place, character in enumerate(found):
            if character in found[:place]:
                raise ValueError(f"{key}: contains {character!r} twice")
        return found


class SpeechManifest(LoadedSource):
    """Utterances of two manifests below ``root``, read by loader processes.

    The first character of the alphabet is symbol 1. ``max_seconds`` is held against the manifest's
    duration, or else the file's. ``sha256`` is over the manifests, the sizes of their files and the
    alphabet.
    """

    def __init__(
        self,
        root: str,
        *,
        train_manifest: str | None,
        eval_manifest: str | None,
        max_seconds: float | None,
        spectrogram: Spectrogram,
        texts: Alphabet,
        serving: Serving,
    ) -> None:
        characters, sample_rate = texts.characters(root), spectrogram.sample_rate
        codes = {character: code for code, character in enumerate(characters, start=1)}
        digest = hashlib.sha256(characters.encode())
        splits = []
        for split, given in (("train", train_manifest), ("eval", eval_manifest)):
            listed = [
                one
                for path in _manifests(root, split, given)
                for one in (read_transcripts if os.path.isdir(path) else read_manifest)(path)
            ]
            splits.append(_checked(listed, texts.lower, codes, digest))
            # Read the first file now: a general fault shows before anything is written.
            read_audio(splits[-1][0].audio, sample_rate)
        train, held_out = splits
        if max_seconds is not None:
            train = [one for one in train if one.length <= max_seconds]
            if not train:
                raise ValueError(
                    f"max_seconds={max_seconds:g}: leaves no utterances; all are longer"
                )
        reader = partial(UtteranceReader, spectrogram, codes, root, serving.batch_size)
        super().__init__(reader(train, serving.seed), reader(held_out, None), serving)
        self.num_symbols = len(codes) + 1
        self.sha256 = digest.hexdigest()
        self.description = {
            "name": "speech_manifest",
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "frequencies": spectrogram.frequencies,
            "num_symbols": self.num_symbols,
            "sample_rate": sample_rate,
            "left_out": len(splits[0]) - len(train),
            "sha256_of": "manifests, alphabet, sizes of files",
        }


def shapes(data: Any) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Return the shapes of a configuration's longest batch, features and targets, and its sizes.

    No file is read; BadInput: only a file knows the lengths or the characters.
    """
    if data.max_seconds is None:
        raise BadInput(
            f"data.max_seconds=null: only the files of data={data.name} tell the longest "
            "utterance, and bench --roofline reads no files; set data.max_seconds=N"
        )
    if data.alphabet_file is not None:
        raise BadInput(
            f"data.alphabet_file={data.alphabet_file}: bench --roofline reads no files; set "
            "data.alphabet"
        )
    spectrogram = Spectrogram(data.sample_rate, data.window_ms, data.hop_ms)
    sizes = {"frequencies": spectrogram.frequencies, "num_symbols": len(data.alphabet) + 1}
    frames = 1 + int(data.max_seconds * data.sample_rate) // spectrogram.hop
    features = data.batch_size, 1, spectrogram.frequencies, frames
    symbols = math.ceil(15 * data.max_seconds)  # as in a second of read English
    return features, (data.batch_size, 2 + symbols), sizes


def _manifests(root: str, split: str, given: str | None) -> list[str]:
    """Return the manifest of a split, or LibriSpeech's folders of it."""
    if given is not None:
        found = sorted(glob(given, root_dir=root))
        if not found:
            raise ValueError(f"{split}_manifest={given}: no such file below {printable(root)}")
        return [os.path.join(root, name) for name in found]
    names = [name + ending for name in _SPLITS[split] for ending in _ENDINGS]
    found = [name for name in names if os.path.isfile(os.path.join(root, name))]
    found = found or sorted(glob(_FOLDERS[split], root_dir=root))
    if len(found) != 1:
        what = f"several manifests of the {split} split" if found else f"no {split} manifest"
        known = ", ".join(found or (*names, _FOLDERS[split]))
        raise DataError(
            f"{printable(root)}: {what}: must be one of {known}; or give data.{split}_manifest"
        )
    return [os.path.join(root, found[0])]


def _checked(
    utterances: list[Utterance], lower: bool, codes: dict[str, int], digest
) -> list[Utterance]:
    found = []
    for one in utterances:
        text = one.text.lower() if lower else one.text
        if unknown := sorted(set(text) - codes.keys()):
            raise DamagedData(
                f"{one.where}: the text contains {unknown[0]!r}, which is not in the alphabet "
                "(data.alphabet, data.alphabet_file, data.lower)"
            )
        with reading(f"{one.where}: {printable(one.audio)} cannot be read"):
            size = os.path.getsize(one.audio)
        digest.update(f"{text}\n{size}\n".encode())
        found.append(one._replace(text=text))
    return found
