"""Sequence to sequence adds these rows to the tables of the core's tests."""

from ...helpers import ONE_CORE

TINY = [*ONE_CORE, "model=seq2seq", "model.hidden_size=8", "model.embedding_size=8"]
TINY += ["data.max_length=8", "data.batch_size=4"]
DROPOUT = [*TINY, "model.dropout=0.3"]
MODELS = {"seq2seq": TINY}
PRODUCTS = {
    "seq2seq": {
        *("forward lstm", "backward lstm", "forward addmm", "forward mm", "backward mm"),
        *("forward bmm", "backward bmm"),
    }
}
RESUMED = {"seq2seq": [*DROPOUT, "optim=sgd"]}
SMALL = {"translation": DROPOUT[len(ONE_CORE) :]}
RANKS = {
    "translation": "model=seq2seq model.embedding_size=8 model.hidden_size=8 model.dropout=0.2 "
    "data.max_length=8 data.batch_size=4 train.accumulate=4 dist.order=fixed"
}
LOSSES = {"seq2seq": 0.6, "seq2seq_3x1024": 0.9, "seq2seq_5x1024": 0.9}
WHOLE = {
    # Of held-out sentences.
    "extensions/translation/task.py": {"_sentences", "samples_of", "corpus_bleu"},
    "extensions/translation/seq2seq.py": set(),
}
PARTS = {"extensions/translation/sentence_pairs.py": {"_batch"}}
RECIPES = {
    "seq2seq_wmt15": """
        model.num_layers=3 model.hidden_size=1024 model.embedding_size=1024 model.dropout=0.0
        data.name=parallel_text data.batch_size=64 data.max_length=50 data.source_vocab_limit=100000
        data.target_vocab_limit=40000 optim.name=sgd optim.lr=0.5 optim.momentum=0.0
        optim.schedule=constant train.steps=340000 train.clip_norm=5.0 compare.metric=loss
        compare.margin=0.01
    """,
}
SCHEDULES = [("seq2seq_wmt15", 340_000, 340_000, {0: 0.5, 339_999: 0.5})]
_LSTMS = "forwards.weight_{0}_l0 backwards.weight_{0}_l0 decoder.weight_{0}_l0"
HIDDEN = {
    "seq2seq": (
        {"source_vocab_size": 9, "target_vocab_size": 9, "num_layers": 1},
        f"{_LSTMS.format('ih')} {_LSTMS.format('hh')} upper bridge key attention.combine",
        "source_embedding target_embedding output",
    )
}
