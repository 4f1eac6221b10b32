"""The metrics of an evaluation, and the margin of a verdict where none is set.

Which task has which: `TaskKind.metrics`, `TaskKind.judged`.
"""

ACCURACIES = ("top1", "top5")
HIGHER_IS_BETTER = (*ACCURACIES, "map", "bleu")
IN_POINTS = (*HIGHER_IS_BETTER, "cer")  # in percent, whose differences are percentage points


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
