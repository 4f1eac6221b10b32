"""Seconds and memory to the first batch of data at the size that users have, made here.

    python benchmarks/data_scale.py FOLDER [--only images,lm1b,text,tokens,speech] [--share 0.1]

FOLDER gets one data set after the other in its official layout (--keep leaves it there), 11 GB and
1.3 million files at most. All take half an hour:

    images  1,281,167 + 50,000 files in 1,000 class folders, 32 x 32 pixels each: a list is
            measured, not decoding
    lm1b    99 shards of One Billion Word and its vocabulary: words drawn by Zipf's law, 8 million
            a shard; the shards are one text that begins at another line each
    text    the same words in one train.txt, whose vocabulary is counted
    tokens  10^10 of 16 bits in a sparse train.bin, all zeros
    speech  281,241 utterances as LibriSpeech has them, links to few FLAC files

--share, at least 0.05, makes that part of it. Two processes open each data set: the first finds
mprun's cache empty, the second what the first left. Seconds run from the end of the imports to the
first batch, by one loader process where there are any. Memory is the main process's largest
resident set. The files were just written: the system's caches are warm.
"""

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

TRAIN, HELD_OUT, CLASSES = 1_281_167, 50_000, 1000
SHARDS, SHARD_WORDS, VOCABULARY = 99, 8_000_000, 793_470
TOKENS, UTTERANCES = 10**10, 281_241
LINE = 26  # words of a sentence


def images(root: Path, share: float) -> None:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(
        content, "JPEG"
    )
    for split, files in (("train", TRAIN), ("val", HELD_OUT)):
        for label in range(CLASSES):
            folder = root / split / f"n{label:08}"
            folder.mkdir(parents=True)
            for number in range(label, round(files * share), CLASSES):
                with open(f"{folder}/{folder.name}_{number}.JPEG", "wb", buffering=0) as file:
                    file.write(content.getbuffer())


def _shards(share: float) -> Iterator[bytes]:
    """Yield the text of the held-out shard, then of each training shard."""
    words = round(SHARD_WORDS * share) // LINE * LINE
    ranks = np.minimum(np.random.default_rng(0).zipf(1.2, words), VOCABULARY - 2)
    names = np.array([f"word{rank}" for rank in range(VOCABULARY)], object)
    lines = [" ".join(line) for line in names[ranks].reshape(-1, LINE).tolist()]
    for shard in range(SHARDS + 1):
        turn = shard * len(lines) // (SHARDS + 1)
        yield "\n".join([*lines[turn:], *lines[:turn], ""]).encode()


def lm1b(root: Path, share: float) -> None:
    for folder in ("training", "heldout"):
        (root / f"{folder}-monolingual.tokenized.shuffled").mkdir(parents=True)
    entries = ["<S>", "<UNK>", *(f"word{rank}" for rank in range(1, VOCABULARY - 1))]
    (root / "1b_word_vocab.txt").write_text("\n".join([*entries, ""]))
    for number, text in enumerate(_shards(share)):
        if number == 0:
            folder, name = "heldout", "news.en.heldout-00001-of-00050"
            text = text[: text.index(b"\n", len(text) // 50) + 1]
        else:
            folder, name = "training", f"news.en-{number:05}-of-00100"
        (root / f"{folder}-monolingual.tokenized.shuffled" / name).write_bytes(text)


def text(root: Path, share: float) -> None:
    root.mkdir()
    with open(root / "train.txt", "wb") as file:
        for number, shard in enumerate(_shards(share)):
            if number:
                file.write(shard)
            else:
                (root / "valid.txt").write_bytes(shard[: shard.index(b"\n", 10**5) + 1])


def tokens(root: Path, share: float) -> None:
    root.mkdir()
    for name, many in (("train", round(TOKENS * share)), ("val", 10**6)):
        with open(root / f"{name}.bin", "wb") as file:
            file.truncate(2 * many)


def speech(root: Path, share: float) -> None:
    import soundfile

    wave = np.random.default_rng(0).normal(0, 0.1, 16_000)
    for split, many in (("train-960", round(UTTERANCES * share)), ("dev-clean", 2703)):
        for first in range(0, many, 20):
            folder = root / split / str(first // 2000) / str(first)
            folder.mkdir(parents=True)
            ids = [f"{first // 2000}-{first}-{number:04}" for number in range(20)]
            (folder / f"{ids[0][:-5]}.trans.txt").write_text(
                "".join(f"{one} A TEXT THAT SOMEBODY READS ALOUD\n" for one in ids)
            )
            for one in ids:
                path = folder / f"{one}.flac"
                if first % 40_000 == 0 and one == ids[0]:  # a file system has a limit of links
                    soundfile.write(path, wave, 16_000)
                    original = path
                else:
                    os.link(original, path)


# What makes it; the words of a command that read it.
SETS: dict[str, tuple[Callable[[Path, float], None], list[str]]] = {
    "images": (images, ["model=resnet50", "data=imagenet", "data.workers=1"]),
    "lm1b": (lm1b, ["model=lstm_lm", "data=lm1b"]),
    "text": (text, ["model=lstm_lm", "data=text", "data.vocab_limit=793470"]),
    "tokens": (tokens, ["model=gpt", "data=token_files"]),
    "speech": (speech, ["model=deep_speech2", "data=speech_manifest", "data.workers=1"]),
}
GIGABYTE = 1e9


def first_batch(words: list[str]) -> None:
    """Print seconds and memory of a process that builds the data of a command."""
    import torch

    from mprun.build.data import build_data
    from mprun.config.compose import compose_config

    config = compose_config(words).config
    before = _peak()
    started = time.perf_counter()
    source = build_data(config.data, 0, torch.device("cpu"))
    source.train_batch(0)
    seconds, peak = time.perf_counter() - started, _peak()
    source.close()
    print(json.dumps([seconds, before, peak, source.description["train_samples"]]))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(SETS))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    print("| data | samples | start | first batch | memory | imports alone | cache |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.only.split(","):
        make, words = SETS[name]
        root, cache = options.folder / name, options.folder / f"{name}-cache"
        if not root.exists():
            make(root, options.share)
        shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, __file__, "--first-batch", *words, f"data.root={root}"]
        for start in ("first", "second"):
            environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            seconds, before, peak, samples = json.loads(done.stdout)
            memory = [f"{size:.2f} GB" for size in (peak, before, bytes_below(cache) / GIGABYTE)]
            row = [name, f"{samples:,}", start, f"{seconds:.1f} s", *memory]
            print(f"| {' | '.join(row)} |", flush=True)
        if not options.keep:
            shutil.rmtree(root)
            shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-batch"]:
        first_batch(sys.argv[2:])
    else:
        main()
