"""Reading words block by block, against reading the file line by line."""

import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.data.source import DamagedData
from mprun.data.vocabulary import LONGEST_WORD, TextFile


def read(path, content: bytes, **options) -> list[str]:
    path.write_bytes(content)
    file = TextFile(path, hashlib.sha256(content).hexdigest(), **options)
    texts = list(file.blocks())
    words = [word for words in file.words("<eos>") for word in words]
    # No word is cut apart, and every line is there.
    assert all(text[-1:].isspace() for text in texts if text)
    joined = "".join(texts)
    assert len(joined.split()) + joined.count("\n") == len(words)
    return words


def line_by_line(path) -> list[str]:
    """As the published recipes read; lines end in LF or CRLF only."""
    words = []
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            words += [*line.split(), "<eos>"]
    return words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" a b \n\n c\n", ["a", "b", "<eos>", "<eos>", "c", "<eos>"]),
        (b"a b", ["a", "b", "<eos>"]),
        (b"a\n ", ["a", "<eos>", "<eos>"]),
        (b"a\r\nb\r\n", ["a", "<eos>", "b", "<eos>"]),
        (b"a\rb\n", ["a", "b", "<eos>"]),
        (b"\xef\xbb\xbfa\n", ["a", "<eos>"]),
        ("ä\tö\u00a0ü\n".encode(), ["ä", "ö", "ü", "<eos>"]),
        (b"a <eos>\n", ["a", "<eos>", "<eos>"]),
    ],
)
def test_words_by_hand(tmp_path, content, words):
    for block in (3, 5, 1 << 18):
        assert read(tmp_path / "text", content, block=block) == words


PIECES = ["a", "ß", "日本", "𝄞", " ", "  ", "\t", "\n", "\r\n", "\u3000", "\x1c", "\x0b", "x" * 9]


@given(st.lists(st.sampled_from(PIECES)), st.integers(3, 40))
def test_any_text_in_any_block_as_line_by_line(tmp_path_factory, pieces, block):
    path = tmp_path_factory.getbasetemp() / "words"
    content = ("w " + "".join(pieces)).encode()
    assert read(path, content, block=block) == line_by_line(path)


def test_lower_case_spares_the_marker(tmp_path):
    content = "The <UNK> ÄRGER\n".encode()
    assert read(tmp_path / "text", content, lower=True) == ["the", "<unk>", "ärger", "<eos>"]
    sha256 = hashlib.sha256(content).hexdigest()
    assert next(TextFile(tmp_path / "text", sha256).words("<S>"))[-1] == "<S>"


@pytest.mark.parametrize("block", [3, 1000, 1 << 18])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no words, 0 bytes"),
        (b"\n \n\r\n", "no words, empty lines only"),
        ("\u3000\n\x1c".encode(), "no words, empty lines only"),
        (b"a b\nc \xff d\n", r"not UTF-8 \(0xff\) at byte 6, line 2"),
        (b"a\n\nb \xc3", r"not UTF-8 \(0xc3\) at byte 5, line 3"),
        (b"\xff\xfea\0", r"not UTF-8 \(0xff\) at byte 0, line 1"),
        (b"\xef\xbb\xbfa\n\xe4 b\n", r"not UTF-8 \(0xe4\) at byte 5, line 2"),
        (b"a\nb\nc\0d\n", "a NUL byte, no text file at byte 5, line 3"),
    ],
)
def test_what_is_no_text(tmp_path, content, message, block):
    with pytest.raises(DamagedData, match=f"text: {message}$"):
        read(tmp_path / "text", content, block=block)


@pytest.mark.parametrize("block", [40_000, 1 << 18, 1 << 20])
@pytest.mark.parametrize("before", [0, 7, 262_000])
def test_the_longest_word(tmp_path, block, before):
    start = b"ab " * (before // 3)
    longest = b"x" * LONGEST_WORD
    for end in (b"", b"\n", b" y\n"):
        words = read(tmp_path / "text", start + longest + end, block=block)
        assert words.count("x" * LONGEST_WORD) == 1
        message = f"a word of more than 65536 bytes at byte {len(start)}$"
        with pytest.raises(DamagedData, match=message):
            read(tmp_path / "text", start + longest + b"x" + end, block=block)


@pytest.mark.slow
def test_one_huge_line_costs_no_memory(tmp_path):
    path = tmp_path / "line"
    content = b"seven words of one line without end " * 150_000
    path.write_bytes(content)
    file = TextFile(path, hashlib.sha256(content).hexdigest(), block=1 << 16)
    size = len(content)
    del content
    tracemalloc.start()
    count = sum(len(words) for words in file.words("<eos>"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 7 * 150_000 + 1
    # 2^16 bytes hold 12,700 words: objects of 54 bytes and references of 8, two blocks at a time,
    # which are 1.6 MB. The words of the whole line are 66 MB.
    assert peak < size / 2


def test_files_that_are_gone_or_change(tmp_path):
    path = tmp_path / "text"
    read(path, b"a b\n")
    with pytest.raises(DamagedData, match="text: was changed while it was read"):
        list(TextFile(path, hashlib.sha256(b"a c\n").hexdigest()).blocks())
    path.unlink()
    with pytest.raises(DamagedData, match="text: No such file or directory"):
        list(TextFile(path, "").blocks())
    with pytest.raises(DamagedData, match="Is a directory"):
        list(TextFile(tmp_path, "").blocks())
