"""Strips of digits; WAV files and manifests, whole and damaged."""

import json
import math
import sys
import wave
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from mprun.assembly.data import check_batches
from mprun.cli import main
from mprun.config.components.custom import CustomDataConfig
from mprun.data import DataError
from mprun.data.image_store import split_digits
from mprun.data.source import DamagedData
from mprun.errors import BadInput
from mprun.extensions.speech.audio import Spectrogram, read_audio
from mprun.extensions.speech.speech_manifest import read_manifest, read_transcripts

from ...helpers import configured, raises_line, refused

RATE = 8000
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made_strips():
    return configured("digit_strips", batch_size=100, seed=0, device="cpu")


def test_strips_hold_their_split_s_digits_side_by_side(made_strips):
    batches = [made_strips.train_batch(0)], list(made_strips.eval_batches())
    assert sum(len(targets) for _, targets in batches[1]) == 300
    for (images, labels), found in zip(split_digits(), batches, strict=True):
        known = [{i.numpy().tobytes() for i in images[labels == label]} for label in range(10)]
        for features, targets in found:
            for strip, target in zip(raw(features), targets.tolist(), strict=True):
                frames, count, *symbols = target
                assert 3 <= count <= 5 and 8 * count <= frames <= 9 * count - 1
                assert not any(symbols[count:]) and not strip[:, :, frames:].any()
                end = 0
                for symbol in symbols[:count]:
                    starts = (end, end + 1) if end else (0,)
                    shown = {s: strip[:, :, s : s + 8].contiguous().numpy() for s in starts}
                    fits = [s for s in starts if shown[s].tobytes() in known[symbol - 1]]
                    assert fits
                    end = fits[-1] + 8
                assert end == frames


def raw(features):
    """The stored bytes of standardised strips; padding, which is the mean, as 0."""
    levels = features[features != 0].unique()
    step = (levels[1:] - levels[:-1]).min()
    values = ((features - levels[0]) / step).round().to(torch.uint8)
    return torch.where(features == 0, torch.zeros_like(values), values)


def test_strips_are_the_same_on_every_machine(made_strips):
    known = "5209024cd24532114b1625180236bc77b2ca91469624582853a6849d99dfc94b"
    assert made_strips.sha256 == known


def write_wav(path, samples, *, width=2, channels=1, rate=RATE):
    """samples: int, per channel alike."""
    shift = 128 if width == 1 else 0
    packed = ((v + shift).to_bytes(width, "little", signed=not shift) for v in samples)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", None))
        file.writeframes(b"".join(value * channels for value in packed))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_every_width(tmp_path, width, channels):
    half = 2 ** (8 * width - 2)
    write_wav(tmp_path / "a.wav", [0, half, -half, -2 * half], width=width, channels=channels)
    assert read_audio(str(tmp_path / "a.wav"), RATE).tolist() == [0.0, 0.5, -0.5, -1.0]


def test_a_tone_is_loudest_at_its_frequency():
    spectrogram = Spectrogram(16000, 20.0, 10.0)
    assert (spectrogram.window, spectrogram.hop, spectrogram.frequencies) == (320, 160, 161)
    tone = np.sin(2 * np.pi * 2000 * np.arange(16000) / 16000).astype(np.float32)
    rows = spectrogram.of(tone)
    assert rows.shape == (161, 101) and rows.dtype == np.float32
    assert (rows[:, 1:-1].argmax(0) == 2000 // 50).all()  # rows are 50 Hz apart
    assert abs(rows.mean()) < 1e-4 and abs(rows.std() - 1) < 1e-4


def corpus(folder, texts=("ab", "b a", "a", "abba"), ending="json"):
    """Manifests of training and evaluation, each with these texts."""
    generator = np.random.default_rng(0)
    rows = []
    for number, text in enumerate(texts):
        count = int(0.1 * RATE * (1 + number))
        write_wav(folder / f"{number}.wav", generator.integers(-9000, 9000, count).tolist())
        rows.append((f"{number}.wav", text, count / RATE))
    for name in ("train", "dev"):
        write_manifest(folder / f"{name}.{ending}", rows)
    return folder


def write_manifest(path, rows):
    keys = ("audio_filepath", "text", "duration")
    if path.suffix == ".csv":
        lines = [",".join(keys), *(",".join(map(str, row)) for row in rows)]
    else:
        lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def source(root, **changed):
    settings = {"sample_rate": RATE, "alphabet": "ab ", "batch_size": 2}
    settings |= {"workers": 0, "seed": 0, "device": CPU}
    return configured("speech_manifest", root=str(root), **settings | changed)


def librispeech(folder, library):
    """As OpenSLR packs it: a folder for each speaker and chapter, with FLAC files and texts."""
    generator = np.random.default_rng(0)
    for split, speaker, chapter, texts in (
        ("train-clean-100", 19, 198, ("AB", "B A")),
        ("train-clean-100", 103, 1240, ("A",)),
        ("dev-clean", 84, 121123, ("ABBA",)),
    ):
        below = folder / f"{split}/{speaker}/{chapter}"
        below.mkdir(parents=True)
        lines = {f"{speaker}-{chapter}-{n:04}": text for n, text in enumerate(texts)}
        listed = "".join(f"{name} {text}\n" for name, text in lines.items())
        (below / f"{speaker}-{chapter}.trans.txt").write_text(listed)
        for name in lines:
            samples = generator.integers(-9000, 9000, RATE // 10)
            library.write(below / f"{name}.flac", samples.astype(np.int16), RATE)
    return folder


def test_librispeech_as_it_is_unpacked(tmp_path):
    library = pytest.importorskip("soundfile")
    root = librispeech(tmp_path / "LibriSpeech", library)
    found = source(root, batch_size=3)
    assert (found.description["train_samples"], found.description["eval_samples"]) == (3, 1)
    listed = read_transcripts(str(root / "train-clean-100"))
    names = [one.audio.rpartition("/")[2] for one in listed]
    assert names == ["103-1240-0000.flac", "19-198-0000.flac", "19-198-0001.flac"]
    assert [one.text for one in listed] == ["A", "AB", "B A"]
    # The same samples as WAV files: a 16-bit number is itself in both.
    rows = []
    for number, one in enumerate(listed):
        samples, _ = library.read(one.audio, dtype="int16")
        write_wav(tmp_path / f"{number}.wav", samples.tolist())
        rows.append((f"{number}.wav", one.text, len(samples) / RATE))
        assert np.array_equal(read_audio(one.audio, RATE), samples / np.float32(2**15))
    write_manifest(tmp_path / "train.json", rows)
    write_manifest(tmp_path / "dev.json", rows[:1])
    same = source(tmp_path, batch_size=3)
    for ours, theirs in zip(found.train_batch(0), same.train_batch(0), strict=True):
        assert torch.equal(ours, theirs)
    assert source(root, train_manifest="train-*").description["train_samples"] == 3
    assert source(root, max_seconds=1.0).description["left_out"] == 0


def test_librispeech_that_is_damaged(tmp_path, monkeypatch):
    library = pytest.importorskip("soundfile")
    root = librispeech(tmp_path / "LibriSpeech", library)
    (root / "dev-other").mkdir()
    with raises_line(DataError, "several manifests of the eval split: must be one of dev-clean"):
        source(root)
    (root / "dev-other").rmdir()
    with raises_line(DamagedData, "is not in the alphabet"):
        source(root, lower=False)
    flac = root / "dev-clean/84/121123/84-121123-0000.flac"
    whole = flac.read_bytes()
    flac.write_bytes(b"no audio")
    with raises_line(DamagedData, "84-121123-0000.flac: cannot be read"):
        source(root)
    library.write(flac, np.zeros(100, np.int16), 2 * RATE)
    with raises_line(DamagedData, "16000 samples per second, must have data.sample_rate=8000"):
        source(root)
    flac.unlink()
    with raises_line(DamagedData, "84-121123.trans.txt:1: "):
        source(root)
    flac.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with raises_line(ValueError, "root: reading audio files other than WAV needs soundfile"):
        source(root)


@pytest.mark.parametrize("ending", ["json", "csv", "jsonl"])
def test_batches_of_a_manifest(tmp_path, ending):
    found = source(corpus(tmp_path, ending=ending))
    assert (found.num_symbols, found.description["frequencies"]) == (4, 81)
    (features, targets), (_, last) = found.eval_batches()
    # 10 ms a frame, and one more: 0.1 s and 0.2 s.
    assert features.shape == (2, 1, 81, 21) and features.dtype is torch.float32
    assert targets.tolist() == [[11, 2, 1, 2, 0], [21, 3, 2, 3, 1]]
    assert last.tolist() == [[31, 1, 1, 0, 0, 0], [41, 4, 1, 2, 2, 1]]
    assert not features[0, ..., 11:].any() and features[0, ..., :11].all(dim=(0, 1, 2)).any()
    expected = Spectrogram(RATE, 20.0, 10.0).of(read_audio(str(tmp_path / "0.wav"), RATE))
    assert np.array_equal(features[0, 0, :, :11].numpy(), expected)


def test_what_is_learned_can_be_limited_and_lower_cased(tmp_path):
    corpus(tmp_path, texts=("AB", "b", "a", "b"))
    found = source(tmp_path, max_seconds=0.25)
    assert found.description["train_samples"] == 2 and found.description["left_out"] == 2
    assert found.description["eval_samples"] == 4
    (tmp_path / "letters.txt").write_text("b\na\n \n")
    other = source(tmp_path, alphabet_file="letters.txt")
    assert next(other.eval_batches())[1][0].tolist() == [11, 2, 2, 1]
    assert other.sha256 != source(tmp_path).sha256


LINE = {"audio_filepath": "0.wav", "text": "a", "duration": 1}
NO_WAV = ": must be a WAV file of PCM samples"
# What a file of a corpus is (a dict: what else is in a line of the manifest, or in a WAV file), and
# what is said behind its name.
DAMAGE = [
    ("train.json", b"{\n", ":1: is not JSON"),
    ("train.json", b"[1]\n", ":1: is a list"),
    ("train.json", {"text": None}, ":1: has no text"),
    ("train.json", {"duration": "long"}, ":1: duration='long' must be a number"),
    ("train.json", {"duration": math.nan}, ":1: duration=nan must be a number of sec"),
    ("train.json", {"duration": 10**400}, ":1: duration=1000"),
    ("train.json", {"audio_filepath": "\ud800.wav"}, ":1: audio_filepath='\\ud800"),
    ("train.json", b"\n", ": lists no utterances"),
    ("train.json", b"\xff\xfe\x00", ": must be UTF-8 text"),
    ("train.json", {"text": "xa"}, ":1: the text contains 'x', which is not in the alphabet"),
    ("train.json", {"audio_filepath": "x.wav"}, "x.wav cannot be read: No such file"),
    ("0.wav", {"rate": 16000}, ": has 16000 samples per second, must have data.sample_rate=8000"),
    ("0.wav", lambda wav: wav[:-100], ": is cut short"),
    ("0.wav", b"fLaC and so on", NO_WAV),
    ("0.wav", {"samples": []}, ": is cut short, or has no samples"),
    ("0.wav", lambda wav: wav[:22] + b"1e999" + wav[22:], f"{NO_WAV}: "),
    ("0.wav", lambda wav: wav[:20] + b"\3\0" + wav[22:], f"{NO_WAV}: unknown format: 3"),
]


@pytest.mark.parametrize(("name", "content", "says"), DAMAGE)
def test_damage_is_told_before_anything_is_trained(tmp_path, name, content, says):
    path = corpus(tmp_path) / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif callable(content):
        path.write_bytes(content(path.read_bytes()))
    elif name == "0.wav":
        write_wav(path, **{"samples": [1, 2, 3]} | content)
    else:
        path.write_text(json.dumps(LINE | content))
    with raises_line(DamagedData, f"{name}{says}" if says.startswith(":") else says):
        source(tmp_path)


def test_a_later_file_that_is_damaged_is_told_when_it_is_read(tmp_path):
    found = source(corpus(tmp_path), batch_size=4)
    (tmp_path / "3.wav").write_bytes(b"RIFF")
    with pytest.raises(DamagedData, match=r"3\.wav: must be a WAV file"):
        found.train_batch(0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alphabet": ""}, "alphabet='': contains no character"),
        ({"alphabet": "aba"}, "alphabet='aba': contains 'a' twice"),
        ({"alphabet_file": "none.txt"}, "alphabet_file=none.txt: cannot be read"),
        ({"train_manifest": "x.json"}, "train_manifest=x.json: no such file"),
        ({"max_seconds": 0.01}, "max_seconds=0.01: leaves no utterances;"),
        ({"hop_ms": 0.01}, "hop_ms=0.01: is too short at sample_rate=8000"),
    ],
)
def test_settings_that_cannot_be(tmp_path, changed, message):
    with raises_line(ValueError, message) as error:
        source(corpus(tmp_path), **changed)
    assert not isinstance(error.value, DamagedData)


def test_a_folder_without_manifests_and_one_with_two(tmp_path):
    with pytest.raises(DataError, match=r"no train manifest: must be one of train\.json"):
        source(tmp_path)
    corpus(tmp_path)
    corpus(tmp_path, ending="csv")
    with pytest.raises(DataError, match="several manifests of the train split"):
        source(tmp_path)


def test_a_manifest_of_another_project(tmp_path):
    (tmp_path / "train.csv").write_text("wav_filename,wav_filesize,transcript\na.wav,3,one  two\n")
    (one,) = read_manifest(str(tmp_path / "train.csv"))
    assert (one.audio, one.text, one.seconds) == (str(tmp_path / "a.wav"), "one two", None)


@pytest.mark.slow
def test_the_command_trains_and_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    corpus(tmp_path / "data")
    common = ["model=deep_speech2", "data=speech_manifest", f"data.root={tmp_path / 'data'}"]
    common += [f"data.sample_rate={RATE}", "data.batch_size=2", "train.steps=2", "device=cpu"]
    assert main([*common, "output_dir=run", "model.hidden_size=4"]) == 0
    capsys.readouterr()
    for wrong, code in (("data.sample_rate=16000", 4), ("data.hop_ms=0.01", 2)):
        refused(capsys, *common, "output_dir=other", wrong, code=code)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, t: (f, t), None),
        (lambda f, t: (f[:, 0], t), "has features float32 [100, 8, 48], must be float32 [batch, 1"),
        (lambda f, t: (f, t[:, 0]), "has targets int64 [100], must be int64 [batch, 2 + most"),
        (lambda f, t: (f[..., :20], t), "has frames from 24 to 43, must be from 1 to 20"),
        (lambda f, t: (f, t[:, :4]), "has lengths of texts from 3 to 5, must be from 0 to 2"),
        (lambda f, t: (f, t - t.new_tensor([0, 0, 1, 1, 1, 0, 0])), "has symbols from 0 to 10"),
    ],
)
def test_utterances_of_one_s_own_are_held_to_what_they_must_be(made_strips, change, message):
    class Own:
        def train_batch(self, index):
            return change(*made_strips.train_batch(index))

        def eval_batches(self):
            return (change(*batch) for batch in made_strips.eval_batches())

        def __getattr__(self, name):
            return getattr(made_strips, name)

    with nullcontext() if message is None else raises_line(BadInput, message):
        check_batches(CustomDataConfig(factory="own:make"), "speech", Own(), CPU)
