"""The loss of sentence pairs, and BLEU by hand and by sacrebleu."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from mprun.extensions.translation.task import corpus_bleu, matches, words_before

SMALL = ["model=seq2seq", "model.hidden_size=8", "model.embedding_size=8", "data.max_length=12"]


def bleu(*pairs):
    return corpus_bleu([sum(row) for row in zip(*(matches(*pair) for pair in pairs), strict=True)])


def words(text):
    return [ord(letter) for letter in text]


def test_bleu_by_hand():
    assert bleu((words("abcdef"), words("abcdef"))) == pytest.approx(100)
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples.
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu((words("abcdxf"), words("abcdef"))) == pytest.approx(expected)


def test_a_short_hypothesis_is_penalised_a_long_one_by_its_precision():
    assert bleu((words("abcde"), words("abcdefgh"))) == pytest.approx(100 * math.exp(1 - 8 / 5))
    expected = 100 * (5 / 8 * 4 / 7 * 3 / 6 * 2 / 5) ** 0.25
    assert bleu((words("abcdeXYZ"), words("abcde"))) == pytest.approx(expected)
    # The lengths are those of the corpus, not of its sentences.
    assert bleu((words("abcd"), words("abcdef")), (words("ghijkl"), words("ghij"))) > 60


def test_words_count_as_often_as_in_the_reference_and_unknown_ones_never():
    assert matches(words("aaaa"), words("aab"))[:4] == [2, 1, 0, 0]
    assert matches([5, 3, 6], [5, 3, 6])[:2] == [2, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    # The second pair is too short for a 4-gram; of the third none matches.
    [("", "abcd"), ("abc", "abc"), ("abcxdef", "abcydef"), ("abcd", ""), ("", "")],
)
def test_no_four_words_in_common_is_zero(one, other):
    assert bleu((words(one), words(other))) == 0


def test_an_empty_hypothesis_counts_with_the_length_of_its_reference():
    both = [(words("abcde"), words("abcde")), ([], words("xyz"))]
    assert bleu(*both) == pytest.approx(100 * math.exp(1 - 8 / 5))


@pytest.mark.parametrize("seed", range(8))
def test_bleu_is_that_of_sacrebleu(seed):
    sacrebleu = pytest.importorskip("sacrebleu")
    draw = random.Random(seed)
    pairs = []
    for _ in range(30):
        reference = [draw.randint(4, 9) for _ in range(draw.randint(1, 12))]
        kept = [word for word in reference if draw.random() < 0.9]
        pairs.append((kept + [4] * draw.choice([0, 0, 2]), reference))
    pairs[3] = ([], pairs[3][1])
    one, other = ([" ".join(map(str, pair[side])) for pair in pairs] for side in (0, 1))
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    expected = metric.corpus_score(one, [other]).score
    assert 1 < expected < 100
    assert bleu(*pairs) == pytest.approx(expected, rel=1e-12)


def test_the_loss_is_per_word_and_padding_none(build_run):
    task = build_run(*SMALL, "data.batch_size=5").task
    source, target = task.data.train_batch(0)
    loss, propagated = task.loss((source, target))
    assert propagated is loss
    total, count = 0.0, 0
    with torch.no_grad():
        for one, labels in zip(source, target, strict=True):
            length = int((labels != 0).sum())
            labels = labels[None, :length]
            logits = task.learner.model(one[None], words_before(labels))
            total += F.cross_entropy(logits[0].double(), labels[0], reduction="sum").item()
            count += length
    assert loss.item() == pytest.approx(total / count, rel=1e-6)


def test_an_evaluation_is_that_of_the_whole_split(build_run):
    small = build_run(*SMALL, "data.batch_size=30").task
    large = build_run(*SMALL, "data.batch_size=100").task
    large.learner.model.load_state_dict(small.learner.model.state_dict())
    one, other = small.evaluate(), large.evaluate()
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
    assert one["bleu"] == other["bleu"] == 0.0
    count = sum(small.samples_of(batch) for batch in small.data.eval_batches())
    assert count == small.data.description["eval_samples"]


def test_bleu_is_of_the_held_out_sentences(build_run, monkeypatch):
    """A translation as in the data scores all but the unknown words, a shorter one scores less."""
    task = build_run(*SMALL).task
    targets = [target for _, target in task.data.eval_batches()]
    answers = iter([*targets, *(target[:, :3] for target in targets)])
    asked: list[int] = []
    answer = lambda _, most, *__: asked.append(most) or next(answers)  # noqa: E731
    monkeypatch.setattr(task.learner.model, "translate", answer)
    whole, cut = task.evaluate()["bleu"], task.evaluate()["bleu"]
    assert asked == 2 * [target.shape[1] for target in targets]
    assert any((target == 3).any() for target in targets)
    assert 95 < whole < 100 and cut == 0  # no 4-gram in three words
