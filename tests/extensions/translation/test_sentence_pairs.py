"""Sentence pairs: batches by hand, Unicode's names, parallel text and what is wrong with it."""

import gzip
import hashlib
import shutil

import pytest
import torch

from mprun.data.source import DamagedData, DataError
from mprun.data.vocabulary import TextFile
from mprun.extensions.translation.sentence_pairs import find_pair_files, unicode_names

from ...helpers import assert_same_bits, configured, refused

SIZES = {"batch_size": 2, "max_length": 6, "vocab_multiple": 8, "seed": 0, "device": "cpu"}


def pairs_in(batches):
    """Of each pair the numbers of both sides."""
    return [
        pair for one, other in batches for pair in zip(one.tolist(), other.tolist(), strict=True)
    ]


@pytest.mark.slow
def test_unicode_s_names_are_the_same_everywhere():
    pairs = {" ".join(source): " ".join(target) for source, target in unicode_names()}
    assert len(pairs) == len(unicode_names()) == 3861
    assert pairs["LATIN SMALL LETTER E WITH ACUTE"] == "LATIN SMALL LETTER E COMBINING ACUTE ACCENT"
    assert pairs["FULLWIDTH DIGIT ONE"] == "<wide> DIGIT ONE"
    assert pairs["ANGSTROM SIGN"] == "LATIN CAPITAL LETTER A WITH RING ABOVE"
    assert not any("CJK" in name or "HANGUL SYLLABLE" in name for name in pairs)
    data = configured("unicode_names", **{**SIZES, "max_length": 16})
    assert data.sha256 == "c18e0b79cdbd29394e41ee9f38a283cb4659e8e29f34c18e510e34be416dc4b0"
    about = data.description
    assert (about["origin"], about["unidata_version"]) == ("unicodedata.ucd_3_2_0", "3.2.0")
    assert about["train_pairs"] + about["train_pairs_left_out"] == 3461
    assert about["eval_pairs"] + about["eval_pairs_left_out"] == 400


def test_no_held_out_pair_is_trained_on():
    data = configured("unicode_names", **{**SIZES, "max_length": 60, "batch_size": 61})
    sides = data.vocabularies

    def text(side, row):
        return " ".join(side[i] for i in row if i)

    def texts(batches):
        return {tuple(map(text, sides, pair)) for pair in pairs_in(batches)}

    train = texts(data.train_batch(i) for i in range(data.batches_per_epoch))
    held_out = texts(data.eval_batches())
    every = {(" ".join(one) + " </s>", " ".join(other) + " </s>") for one, other in unicode_names()}
    assert len(train) == data.batches_per_epoch * 61 and train <= every
    assert {source for source, _ in train}.isdisjoint(source for source, _ in held_out)
    assert sum("<unk>" not in source for source, _ in held_out) > 300


TRAIN = ["a b c", "b", "", "c c b a a", "B a"]
GERMAN = ["x y", "y </s> y", "z", "x x", "y x\r"]
VALID = ["b q", "a"], ["<pad> y", "x w x"]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    root.mkdir()
    return made(root)


def made(root):
    write(root, "train", TRAIN, GERMAN)
    write(root, "valid", *VALID)
    return root


def write(root, split, source, target):
    (root / f"{split}.en").write_text("\n".join(source) + "\n", encoding="utf-8", newline="")
    (root / f"{split}.de").write_text("\n".join(target) + "\n", encoding="utf-8", newline="")


def source(root, **options):
    given = {**SIZES, "target_language": "de", "cache": root.parent / "cache", **options}
    return configured("parallel_text", root=root, **given)


def test_parallel_text_by_hand(folder):
    text = source(folder)
    # a 4, b 4, c 3, B 1; x 4, y 4, then z and the symbol's name, which is none of a text's words.
    assert text.vocabularies == (
        ("<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "B"),
        ("<pad>", "<s>", "</s>", "<unk>", "x", "y", "z"),
    )
    # Left out: the third pair, which has an empty side.
    assert text.batches_per_epoch == 2 and text.samples_per_batch == round(2 * 13 / 4)
    pairs = pairs_in(text.train_batch(i) for i in range(2))
    assert {tuple(map(tuple, pair)) for pair in pairs} == {
        ((4, 5, 6, 2, 0, 0), (4, 5, 2, 0, 0, 0)),
        ((5, 2, 0, 0, 0, 0), (5, 3, 5, 2, 0, 0)),
        ((6, 6, 5, 4, 4, 2), (4, 4, 2, 0, 0, 0)),
        ((7, 4, 2, 0, 0, 0), (5, 4, 2, 0, 0, 0)),
    }
    (one,) = text.eval_batches()
    assert [part.tolist() for part in one] == [
        [[5, 3, 2, 0, 0, 0], [4, 2, 0, 0, 0, 0]],
        [[3, 5, 2, 0, 0, 0], [4, 3, 4, 2, 0, 0]],
    ]
    assert all(part.dtype is torch.int64 for part in one)
    names = ("train.en", "train.de", "valid.en", "valid.de")
    hashes = "".join(hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names)
    assert text.sha256 == hashlib.sha256(hashes.encode()).hexdigest()
    about = text.description
    assert (about["files"], about["eval_split"]) == (", ".join(names), "valid")
    for split, found in (("train", (13, 4, 1)), ("eval", (7, 2, 0))):
        counted = ("samples", "pairs", "pairs_left_out")
        assert tuple(about[f"{split}_{name}"] for name in counted) == found
    for side, entries in (("source", 8), ("target", 7)):
        assert (about[f"{side}_vocab_entries"], about[f"{side}_vocab_size"]) == (entries, 8)


def test_limits_length_and_case(folder):
    text = source(folder, source_vocab_limit=5, lower=True, max_length=4)
    # Four times both, and a stands before b.
    assert text.vocabularies[0] == ("<pad>", "<s>", "</s>", "<unk>", "a")
    assert text.description["train_pairs_left_out"] == 2  # and the one of five words
    with pytest.raises(ValueError, match="batch_size=4 is not allowed: must be 1 to 3"):
        source(folder, max_length=4, batch_size=4)
    with pytest.raises(DataError, match="data.max_length=2: leaves no training pair"):
        source(folder, max_length=2, batch_size=1)


def batches_of(text):
    return [*(text.train_batch(i) for i in range(4)), *text.eval_batches()]


def assert_same(one, other):
    assert_same_bits(batches_of(one), batches_of(other))


def test_columns_and_gzip_hold_the_same_pairs(folder, tmp_path):
    plain = source(folder)
    packed, columns = tmp_path / "packed", tmp_path / "columns"
    packed.mkdir()
    columns.mkdir()
    for path in folder.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    lines = "".join(f"{one}\t{other}\n" for one, other in zip(TRAIN, GERMAN, strict=True))
    (columns / "train.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    (columns / "dev.tsv").write_text("b q\t<pad> y\na\tx w x\n")
    for root in (packed, columns):
        other = source(root)
        assert_same(plain, other)
        assert other.vocabularies == plain.vocabularies and other.sha256 != plain.sha256


def test_what_is_encoded_is_read_from_the_cache(folder, monkeypatch):
    first = source(folder)
    monkeypatch.setattr("mprun.extensions.translation.sentence_pairs.pairs_of", None)
    assert_same(first, source(folder))
    # Another order, the same pairs; half of the cache is made again.
    monkeypatch.undo()
    for path in (folder.parent / "cache").glob("*.starts"):
        path.unlink()
    assert_same(first, source(folder))


def test_thousands_of_pairs_are_written_in_pieces(folder, monkeypatch):
    monkeypatch.setattr("mprun.extensions.translation.sentence_pairs.BLOCK", 5)
    numbers = [str(i) for i in range(40)]
    write(folder, "train", numbers, [f"{i} {i}" for i in numbers])
    text = source(folder, batch_size=40)
    one, other = text.vocabularies
    found = {(one[a[0]], other[b[1]]) for a, b in pairs_in([text.train_batch(0)])}
    assert found == {(i, i) for i in numbers}


GIGA = "giga-fren.release2.fixed.en.gz giga-fren.release2.fixed.fr.gz"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("train.en train.fr", "train.en train.fr"),
        ("train.en.gz train.fr", "train.en.gz train.fr"),
        ("train.tsv", "train.tsv"),
        (f"{GIGA} train.en", GIGA),
        ("train.en train.de", "no train split .train.en has no other side.: it needs train.en and"),
        ("", "no train split: it needs train.en and train.fr, or train.tsv"),
        ("train.en train.fr train.tsv.gz", "several files of the train split; keep only one"),
    ],
)
def test_names(tmp_path, names, found):
    for name in names.split():
        (tmp_path / name).touch()
    if names.startswith(found):
        files = find_pair_files(tmp_path, "train", ("en", "fr"))
        assert [path.name for path in files] == found.split()
    else:
        with pytest.raises(DataError, match=found):
            find_pair_files(tmp_path, "train", ("en", "fr"))


def cut(root):
    for side in ("en", "de"):
        packed = gzip.compress((root / f"train.{side}").read_bytes() * 99)
        (root / f"train.{side}.gz").write_bytes(packed[:-9])
        (root / f"train.{side}").unlink()


def three_columns(root):
    for side in ("en", "de"):
        (root / f"train.{side}").unlink()
    (root / "train.tsv").write_text("a\tb\na\tb\tc\n")


# A file and its new content, or what else is done; the exit code, and what is said.
DAMAGES = [
    (("train.de", b"x\ny\n"), 4, "train.de: ends after line 2, but train.en continues; both must "),
    (("train.de", b"x y\ny\nx \xff\nx\ny\n"), 4, "train.de: not UTF-8 (0xff) at byte 8, line 3"),
    (("valid.en", b""), 4, "valid.en: no words, 0 bytes"),
    (("train.en", b"a " * 600_000), 4, "train.en: line 1 has more than 1048576 characters"),
    (cut, 4, "train.en.gz: is not a complete gzip file ("),
    (lambda root: shutil.move(root / "train.en", root / "train.en.gz"), 4, "(Not a gzipped file"),
    (three_columns, 4, "train.tsv: line 2 has 3 columns, must be source, tab, target"),
    (lambda root: (root / "valid.de").unlink(), 2, "no valid split "),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("damage", "code", "says"), DAMAGES)
def test_damaged_text_is_one_line_and_nothing_is_written(folder, damage, code, says, capsys):
    if isinstance(damage, tuple):
        (folder / damage[0]).write_bytes(damage[1])
    else:
        damage(folder)
    out, cache = folder.parent / "run", folder.parent / "cache"
    command = ["model=seq2seq", "data=parallel_text", f"data.root={folder}", f"data.cache={cache}"]
    command += ["data.target_language=de", "device=cpu", f"output_dir={out}"]
    refused(capsys, *command, says=says, code=code)
    assert not out.exists()


def test_a_file_that_changes_while_it_is_read_is_noticed(folder):
    from mprun.extensions.translation.sentence_pairs import pairs_of

    paths = find_pair_files(folder, "train", ("en", "de"))
    files = [TextFile(path, "0" * 64) for path in paths]
    with pytest.raises(DamagedData, match="train.*: was changed while it was read"):
        list(pairs_of(files))
