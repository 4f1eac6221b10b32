"""Tokens per second of the text reader: encoding a file, and delivering batches.

    python benchmarks/text_speed.py ROOT [--windows 9] [--json FILE]

ROOT holds train and valid files as for `data=text`. Encoding is compared with a loop that reads
line by line and looks each word up; delivery from a file with delivery from a tensor in memory. The
two of a pair run in turns, after a check that both give the same tokens. The ratio is taken window
by window (a machine's drift cancels); the result is the median. It uses CPU time of one thread,
user and system, so that other work on the machine counts little. The files are in the page cache.
Target: encoding at least 0.75 times the loop, which checks neither the text nor its hash.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mprun.build.data import build_data
from mprun.config.components.language import TextConfig
from mprun.data.text import find_text_files
from mprun.data.token_streams import TokenStreams
from mprun.data.vocabulary import WordIds, text_blocks, word_blocks

SHAPES = ((20, 35), (128, 20))  # streams, tokens: Zaremba et al.'s larger models, bigLSTM


def line_by_line(path: Path, ids: dict[str, int]) -> list[int]:
    """Encode with the loop of the published recipes."""
    tokens = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.split() + ["<eos>"]:
                tokens.append(ids[word])
    return tokens


def in_turns(first: Callable, second: Callable, windows: int) -> tuple[list[float], list[float]]:
    """Return CPU seconds of each call; the first of a pair alternates, the first pair warms up."""
    seconds: dict[Callable, list[float]] = {first: [], second: []}
    for window in range(windows + 1):
        for contender in (first, second)[:: 1 if window % 2 else -1]:
            started = time.process_time()
            contender()
            if window:
                seconds[contender].append(time.process_time() - started)
    return seconds[first], seconds[second]


def result(case: str, tokens: int, plain: list[float], ours: list[float]) -> dict:
    ratios = [slow / fast for slow, fast in zip(plain, ours, strict=True)]
    return {
        "case": case,
        "plain_tokens_per_s": tokens / statistics.median(plain),
        "mprun_tokens_per_s": tokens / statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "windows": len(ratios),
    }


def encoding(path: Path, words: tuple[str, ...], windows: int) -> dict:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    ids = WordIds(words, "<unk>")

    def plain() -> list[int]:
        return line_by_line(path, ids)

    def ours() -> list[np.ndarray]:
        return list(ids.encoded(word_blocks(text_blocks(path, sha256), "<eos>")))

    wanted = plain()
    assert np.array_equal(np.concatenate(ours()), wanted)
    return result(
        "encode a file, against line by line", len(wanted), *in_turns(plain, ours, windows)
    )


def delivery(path: Path, streams: int, length: int, windows: int) -> dict:
    tokens = torch.from_numpy(np.fromfile(path, "<i4"))
    files = TokenStreams([path], path, streams, length, 0, "cpu")
    memory = TokenStreams([tokens], tokens, streams, length, 0, "cpu")
    batches = files.batches_per_epoch

    def ours() -> None:
        for index in range(batches, 2 * batches):
            files.train_batch(index)

    def plain() -> None:
        for index in range(batches, 2 * batches):
            memory.train_batch(index)

    for index in (0, 1, batches - 1, batches + 1):
        for part, wanted in zip(files.train_batch(index), memory.train_batch(index), strict=True):
            assert torch.equal(part, wanted)
    for source in (files, memory):
        source.train_batch(0)  # each window reads its epoch again
    seconds = {}

    def anew(source, run: Callable) -> Callable:
        def window() -> None:
            run()
            source.train_batch(0)

        return window

    seconds = in_turns(anew(memory, plain), anew(files, ours), windows)
    case = f"deliver {streams} x {length}, file against memory"
    found = result(case, batches * streams * length, *seconds)
    return found | {"mprun_batches_per_s": found["mprun_tokens_per_s"] / streams / length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        config = TextConfig(root=str(arguments.root), cache=cache, batch_size=20)
        started = time.process_time()
        text = build_data(config, 0, torch.device("cpu"))
        first_start = time.process_time() - started
        started = time.process_time()
        build_data(config, 0, torch.device("cpu"))
        later_start = time.process_time() - started
        train = find_text_files(arguments.root, ("train",))["train"]
        results = [encoding(train, text.vocabulary, arguments.windows)]
        tokens = max(Path(cache).glob("*.tokens"), key=lambda path: path.stat().st_size)
        results += [delivery(tokens, *shape, arguments.windows) for shape in SHAPES]
    print("| case | plain Mtoken/s | mprun Mtoken/s | ratio | min-max | batches/s |")
    print("|---|---|---|---|---|---|")
    for found in results:
        batches = found.get("mprun_batches_per_s")
        print(
            f"| {found['case']} | {found['plain_tokens_per_s'] / 1e6:.2f} | "
            f"{found['mprun_tokens_per_s'] / 1e6:.2f} | {found['ratio']:.2f} | "
            f"{found['ratio_min']:.2f}-{found['ratio_max']:.2f} | "
            f"{'' if batches is None else f'{batches:,.0f}'} |"
        )
    print(f"\nFirst start (count, encode, write) {first_start:.2f} s, later {later_start:.3f} s.")
    report = {"results": results, "first_start_s": first_start, "later_start_s": later_start}
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
