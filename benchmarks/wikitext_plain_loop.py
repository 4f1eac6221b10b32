"""Does mprun's FP32 reach the perplexity of a plain PyTorch loop on WikiText-2?

The loop below shares no code with mprun: it reads the files, makes the vocabulary, cuts the text
into streams and trains an LSTM with torch alone, in the conventional way (Zaremba et al., arXiv
1409.2329; the layout of pytorch/examples word_language_model). mprun runs through its command line
with the same settings. Both start from the same seed, so that initial weights and dropout masks are
the same. Only rounding remains (mprun's SGD kernel is fused).

    python benchmarks/wikitext_plain_loop.py --data DIR --steps 200 --seeds 0,1,2 --out FILE.json

Prints a Markdown table; FILE.json keeps every number.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def read_words(path: Path) -> list[str]:
    words = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        words += [*line.split(), "<eos>"]
    return words


def streams(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Put `count` equal pieces of the text side by side: [length, count]."""
    length = len(ids) // count
    return ids[: length * count].view(count, length).t().contiguous()


class Model(nn.Module):
    """Embedding, two LSTM layers, output layer; dropout between them (Zaremba et al.)."""

    def __init__(self, vocabulary: int, hidden: int, dropout: float, init_range: float):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, 2, dropout=dropout)
        self.output = nn.Linear(hidden, vocabulary)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-init_range, init_range)

    def forward(self, tokens, state):
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.output(self.dropout(outputs)), state


def plain(options, seed: int) -> dict[str, float]:
    """Train `options.steps` steps; return the loss per token of the first validation tokens."""
    folder = Path(options.data)
    train = read_words(folder / "wiki.train.tokens")
    held_out = read_words(folder / "wiki.valid.tokens")[: options.eval_tokens]
    counts = Counter(train)
    special = ["<unk>", "<eos>"]
    ranked = sorted(set(counts) - set(special), key=lambda word: (-counts[word], word))
    ids = {word: index for index, word in enumerate(special + ranked)}
    vocabulary = -(-len(ids) // 8) * 8
    tokens = torch.tensor([ids[word] for word in train])
    batch, time_steps = options.batch, options.time_steps
    # A target is one word later, across the ends of the streams.
    inputs = streams(tokens, batch)
    targets = streams(torch.cat([tokens[1:], tokens[:1]]), batch)

    torch.manual_seed(seed)
    model = Model(vocabulary, options.hidden, options.dropout, options.init_range)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    state, started = None, time.perf_counter()
    for step in range(options.steps):
        part = slice(step * time_steps, (step + 1) * time_steps)
        optimizer.zero_grad()
        logits, state = model(inputs[part], state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets[part].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
    seconds = time.perf_counter() - started

    model.eval()
    ids_held_out = torch.tensor([ids.get(word, 0) for word in held_out])
    count = 16
    left_out = (len(ids_held_out) - 1) % count
    inputs = streams(ids_held_out[left_out:-1], count)
    targets = streams(ids_held_out[left_out + 1 :], count)
    total, state = 0.0, None
    with torch.no_grad():
        for start in range(0, len(inputs), time_steps):
            part = slice(start, start + time_steps)
            logits, state = model(inputs[part], state)
            total += F.cross_entropy(
                logits.flatten(0, 1), targets[part].flatten(), reduction="sum"
            ).double()
    return {
        "loss": float(total / targets.numel()),
        "train_loss": float(loss.detach()),
        "seconds": seconds,
    }


def through_mprun(options, seed: int, folder: Path) -> dict[str, float]:
    """Do the same through the command line; return evaluation and last training loss."""
    command = [sys.executable, "-m", "mprun", "model=lstm_lm", "data=text", "precision=fp32"]
    command += [
        f"data.root={options.data}",
        f"data.batch_size={options.batch}",
        f"data.sequence_length={options.time_steps}",
        f"data.eval_tokens={options.eval_tokens}",
        "data.rotate=false",
        f"model.hidden_size={options.hidden}",
        f"model.embedding_size={options.hidden}",
        f"model.dropout={options.dropout}",
        f"model.init_range={options.init_range}",
        f"optim.lr={options.lr}",
        f"train.clip_norm={options.clip}",
        f"train.steps={options.steps}",
        f"train.log_every={options.steps}",
        f"threads={options.threads}",
        f"seed={seed}",
        "device=cpu",
        f"output_dir={folder / f's{seed}'}",
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    records = (folder / f"s{seed}" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in records]
    train = [row for row in rows if row["split"] == "train"][-1]
    held_out = [row for row in rows if row["split"] == "eval"][-1]
    return {"loss": held_out["loss"], "train_loss": train["loss"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of wiki.{train,valid}.tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--hidden", type=int, default=650)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--init-range", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--time-steps", type=int, default=35)
    parser.add_argument("--eval-tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in map(int, options.seeds.split(",")):
            rows.append(
                {
                    "seed": seed,
                    "plain": plain(options, seed),
                    "mprun": through_mprun(options, seed, Path(scratch)),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("| seed | perplexity, plain loop | perplexity, mprun | difference of the loss |")
    print("|---|---|---|---|")
    for row in rows:
        a, b = row["plain"]["loss"], row["mprun"]["loss"]
        print(f"| {row['seed']} | {math.exp(a):.3f} | {math.exp(b):.3f} | {b - a:+.2e} |")
    if options.out:
        record = {
            "settings": vars(options),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
