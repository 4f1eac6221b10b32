"""The metrics of an evaluation, and the margin of a verdict if none is set.

The metrics of each task: `TaskKind.metrics`, `TaskKind.judged`.
"""

ACCURACIES = ("top1", "top5")
HIGHER_IS_BETTER = (*ACCURACIES, "map", "bleu")
IN_POINTS = (*HIGHER_IS_BETTER, "cer")  # in percent, whose differences are percentage points


def default_margin(metric: str, data: str | None) -> float:
    """Return the margin of "matches" for a metric of the evaluation on the data source `data`.

    For losses and distances it is relative to the mean of the FP32 runs (0.01 is 1 %), for metrics
    in percent it is in percentage points. It is judged, not derived. Half a point of top-1 is
    above the seed noise of published ResNet-50 runs (0.15 points); one of 360 held-out digits is
    already 0.28 points. A perplexity is judged as its logarithm, which is a loss.
    docs/sample_metric.md weighs the sliced Wasserstein distance's margin against measured noise.
    """
    if metric in IN_POINTS:
        return 1.0 if data == "digits" else 0.5
    return 0.1 if metric == "sliced_wasserstein" else 0.01
