"""Small runs as the overrides a user would type: a step takes milliseconds on one core."""

ONE_CORE = ["device=cpu", "threads=1"]
LM = [
    *ONE_CORE,
    "model=lstm_lm",
    "model.hidden_size=16",
    "model.embedding_size=16",
    "data.vocab_limit=100",
    "data.batch_size=4",
    "data.sequence_length=5",
]
SPEECH = [
    *ONE_CORE,
    "model=deep_speech2",
    "model.channels=2",
    "model.hidden_size=8",
    "data.batch_size=4",
]
# Without the text of the documentation, which takes a moment to read.
TINY_LM = [
    *ONE_CORE,
    "model=lstm_lm",
    "model.hidden_size=8",
    "model.embedding_size=8",
    "data=synthetic_tokens",
    "data.vocab_size=16",
    "data.sequence_length=4",
    "data.batch_size=2",
    "data.train_tokens=200",
]
