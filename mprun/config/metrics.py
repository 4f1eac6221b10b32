"""What each kind of task learns from and measures, and the metric and margin of a verdict where
none is set.

Reading runs needs it too, which needs no Hydra.
"""

ACCURACIES = ("top1", "top5")
HIGHER_IS_BETTER = (*ACCURACIES, "map", "bleu")
IN_POINTS = (*HIGHER_IS_BETTER, "cer")  # in percent, whose differences are percentage points
# Task -> the family of data that it learns from; all others from images.
FAMILIES = {
    "language_model": "text",
    "detection": "boxes",
    "speech": "utterances",
    "translation": "sentence_pairs",
}
# Task -> the metrics of its evaluation.
METRICS = {
    "classification": ("loss", *ACCURACIES),
    "language_model": ("loss", "perplexity"),
    "gan": ("loss", "d_loss", "g_loss", "sliced_wasserstein"),
    "reconstruction": ("loss",),
    "detection": ("loss", "map"),
    "speech": ("loss", "cer"),
    "translation": ("loss", "perplexity", "bleu"),
}


def default_metric(task: str) -> str:
    """Top-1 accuracy for classifiers, as in table 1 of the paper; else the loss.

    A held-out loss of a small classifier varies by a quarter from seed to seed, so that no
    affordable number of seeds decides about 1 % of it.
    """
    return "top1" if task == "classification" else "loss"


def default_margin(metric: str, data: str | None) -> float:
    """The margin of "matches" for a metric of the evaluation on the data source named `data`.

    Relative to the mean of the FP32 runs (0.01 is 1 %) for losses and distances, in percentage
    points for those in percent. Judgement, not derivation. Half a point of top-1 is above the seed
    noise of published ResNet-50 runs (0.15 points); of 360 held-out digits one image is 0.28 points
    already. A perplexity is judged as its logarithm, which is a loss. The margin of the sliced
    Wasserstein distance is weighed against measured seed noise in docs/sample_metric.md.
    """
    if metric in IN_POINTS:
        return 1.0 if data == "digits" else 0.5
    return 0.1 if metric == "sliced_wasserstein" else 0.01
