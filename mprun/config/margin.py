"""The margin of "matches" where the configuration gives none; imports nothing.

A margin is relative to the mean of the FP32 runs (0.01 is 1 %) for losses and distances, and in
percentage points for accuracies.
"""

ACCURACIES = ("top1", "top5")


def default_margin(metric: str, data: str | None) -> float:
    """The margin of a metric of the evaluation on the data source named `data`.

    Judgement, not derivation. Half a point of top-1 is above the seed noise of published ResNet-50
    runs (0.15 points); of 360 held-out digits one image is 0.28 points already. A perplexity is
    judged as its logarithm, which is a loss. The margin of the sliced Wasserstein distance is
    weighed against measured seed noise in docs/sample_metric.md.
    """
    if metric in ACCURACIES:
        return 1.0 if data == "digits" else 0.5
    return 0.1 if metric == "sliced_wasserstein" else 0.01
