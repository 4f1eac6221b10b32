"""What a word may mean that nobody knows here: a key, a value, a verb; and what must be instead."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# Names in other tools -> names here: keys (""), and values of a key. The nearest comes first.
_HALF = ("amp", "fp16_master_scaled", "fp16_naive")
_BF16 = ("amp_bf16", "bf16_master", "bf16_naive")
_ELSEWHERE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "": {
        **dict.fromkeys(("max_steps", "iterations"), "train.steps"),
        **dict.fromkeys(("max_epochs", "num_epochs"), "train.epochs"),
        **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "train.clip_norm"),
        **dict.fromkeys(("accumulate_grad_batches", "grad_accum"), "train.accumulate"),
        **dict.fromkeys(("amp", "fp16", "bf16", "dtype", "mixed_precision"), "precision"),
        **dict.fromkeys(("accelerator", "gpu", "gpus"), "device"),
        **{"learning_rate": "optim.lr", "num_workers": "data.workers", "arch": "model"},
        **{"dataset": "data", "optimizer": "optim", "data_dir": "data.root"},
        **{"loss_scale": "scaler.scale"},
        **{"output": "output_dir", "wd": "optim.weight_decay", "bs": "data.batch_size"},
    },
    "device": {"gpu": "cuda"},
    # torch.amp, Lightning, Accelerate, Keras, apex
    "precision": {
        **dict.fromkeys(("16", "fp16", "float16", "f16", "half", "o2"), _HALF),
        **dict.fromkeys(("bf16", "bfloat16"), _BF16),
        **dict.fromkeys(("16-mixed", "mixed", "mixed_float16", "autocast", "o1"), "amp"),
        **dict.fromkeys(("bf16-mixed", "mixed_bfloat16"), "amp_bf16"),
        **dict.fromkeys(("32", "32-true", "float32", "float", "full", "no", "o0"), "fp32"),
        **{"o2": "fp16_master_scaled", "o3": "fp16_naive", "half": "fp16_naive"},
        **{"16-true": "fp16_naive", "bf16-true": "bf16_naive"},
    },
}


# Keys, values, verbs and their options of an earlier mprun, and what is said of them.
RENAMED = {
    "precision.products": "now precision.matmul",
    "precision.products.power_of_two": "now precision.matmul.scale: pow2 for true, fp32 for false",
    "numerics.enabled": "now numerics.probes",
    "numerics=on": "now numerics=probes",
    "train.fused_norm": "now train.compile=default, which fuses BatchNorm and ReLU",
    "mismatch": "now mprun logprobs",
    "compare --tag": "now --scalar",
    "scaler-replay": "now a run for each rule: mprun -m precision=amp scaler=torch,apex,megatron",
}


def became(name: str) -> str | None:
    """Return what became of a name in RENAMED, or of a key whose group was renamed."""
    group, _, field = name.rpartition(".")
    above = RENAMED.get(group)
    return RENAMED.get(name) or (above and f"{above}.{field}")


def meant(word: str, known: Iterable[str], key: str = "") -> list[str]:
    """Return the known words that `word` may mean, the likeliest first; at most three.

    They are its names from other tools, else words that begin so, else the closest spelling.
    key: the key whose value it is; "" for a key.
    """
    small, names = word.lower(), {name.lower(): name for name in known}
    other = _ELSEWHERE.get(key, {}).get(small, small.partition(":")[0])  # cuda:0 is one of cuda
    found = [name for name in ([other] if isinstance(other, str) else other) if name in names]
    if not found and len(word) > 1:
        found = [name for name in names if name.startswith(small)]
    found = found[:3] or get_close_matches(small, list(names), n=1, cutoff=0.6)
    return [names[name] for name in found]


def key_called(word: str, known: Iterable[str]) -> str | None:
    """Return the key with the name `word`: here, in other tools, or by its last part; or None."""
    known = sorted(known)
    other = _ELSEWHERE[""].get(word, word)
    same_end = (key for key in known if "." in key and key.rpartition(".")[2] == word)
    return str(other) if other in known else next(same_end, None)


def did_you_mean(words: Sequence[str]) -> str:
    """Return `did you mean 'a', 'b' or 'c'?`, or nothing without words."""
    *most, last = [f"'{word}'" for word in words] or [""]
    return f"did you mean {', '.join(most)}{' or ' if most else ''}{last}?" if last else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest known words, what became of it, or nothing."""
    hint = became(word) or did_you_mean(meant(word, known))
    return f"; {hint}" if hint else ""


_MOST_LISTED = 100  # characters of a list in one line


def must_be(word: str, known: Iterable[str], key: str = "") -> str:
    """Return `must be one of a, b, c`, after the likely meaning; of a former value its name now.

    Of a long list, `fp8_*` stands for three or more that begin so.
    """
    if now := RENAMED.get(f"{key}={word}"):
        return now
    known = list(known)
    hint, shown, more = did_you_mean(meant(word, known, key)), known, ""
    if len(", ".join(known)) > _MOST_LISTED:
        family = {name: re.split("(?<=_)", name)[0] for name in known}
        sizes = Counter(family.values())
        shown = list(dict.fromkeys(f"{f}*" if sizes[f] > 2 else name for name, f in family.items()))
        more = f" (mprun --help {key})" * bool(key)
    listed = f"{', '.join(shown) or '(none yet)'}{more}"
    return f"{f'{hint} It ' if hint else ''}must be one of {listed}"


def word(value: object) -> str:
    """Return a value as it is typed, but for what Python quotes."""
    return "null" if value is None else str(value)
