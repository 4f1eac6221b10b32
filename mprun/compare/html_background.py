"""What stands behind the verdicts of a group, as HTML: method, configuration, environment.

Every value is escaped here.
"""

from html import escape
from typing import Any

from mprun.compare.arms import is_gan
from mprun.compare.equivalence import ALPHA
from mprun.compare.findings import Comparison, Group
from mprun.compare.formatting import baseline_name, level_text, margin_text, metric_name


def method(comparison: Comparison, group: Group) -> str:
    """How the verdict is made, with this group's numbers."""
    base, margin = escape(baseline_name(group)), escape(margin_text(group))
    methods = sorted({row.verdict.method for row in group.rows if row.verdict.method})
    how = " and ".join(
        {"paired": "paired by seed", "Welch": "unpaired (Welch)"}.get(name, escape(name))
        for name in methods
    )
    turned = " Differences are turned so that positive is worse." if group.higher_is_better else ""
    log = (
        " Perplexity is judged as its logarithm, the mean loss in nats per token."
        if group.metric == "perplexity"
        else ""
    )
    foreign = any(run.foreign for run in group.baseline.arm.runs)
    outcome = (
        f"the mean of the last tenth of the values of {escape(group.metric)}, at least three."
        if foreign
        else f"{escape(metric_name(group))} of the final evaluation"
        f"{'s' if group.window > 1 else ''}, in FP32 arithmetic in every mode unless its "
        "configuration says otherwise."
    )
    gan = is_gan(group.keys)
    progress = f", or if its smoothed training loss made less than 10 % of {base}'s progress"
    overall = f"{100 * ALPHA:g} %"
    paragraphs = [
        f"<b>Outcome.</b> Of each run: {outcome}{log}{turned}",
        "<b>Divergence first.</b> A run diverged if a loss at an applied step was not finite, if "
        f"more than 50 updates in a row were skipped{'' if foreign or gan else progress}.",
        f"<b>Equivalence test.</b> Two one-sided tests (TOST) at α = {comparison.alpha:.3g} each"
        f"{f', {how}' if how else ''}: a mode matches if the {level_text(group)} confidence "
        f"interval of its difference lies inside ±{margin}, worse if all of it lies above, likely "
        "worse if it lies above zero. Failing to find a difference is never a match. Fewer than "
        "3 seeds give no verdict.",
        f"<b>Margin.</b> ±{margin}, fixed in the configuration before the runs unless a note at "
        "the top says otherwise.",
        f"<b>Several modes.</b> Each row has its own error rate of {overall}; nothing is corrected "
        "for the number of rows. The bands in the figures are no test.",
    ]
    if comparison.looks:
        looks = ", ".join(str(look) for look in comparison.looks)
        paragraphs.append(
            f"<b>Looks.</b> Planned at {looks} seeds; α of each look is lowered so that the error "
            f"rate over all of them stays {overall}, which widens the intervals."
        )
    if any(row.verdict.name == "not assessed" for row in group.rows):
        paragraphs.append(
            "<b>Not assessed.</b> The losses of a GAN say who is winning, not how good the samples "
            "are; without a metric of the samples there is no verdict."
        )
    return "".join(f"<p>{text}</p>" for text in paragraphs)


def configuration(group: Group) -> str:
    """Per mode the keys that differ from the baseline's, and those that all runs share."""
    base = escape(baseline_name(group))
    lines = []
    for row in group.rows:
        texts = [
            f"{_pair(key, own)} ({base}: <code>{_text(before)}</code>)"
            for key, (before, own) in row.arm.differs.items()
        ]
        if texts:
            lines.append(f"<li><b>{escape(row.arm.label)}</b>: {', '.join(texts)}</li>")
    differs = f"<p>Other than in {base}:</p><ul>{''.join(lines)}</ul>" if lines else ""
    same = "".join(f"<li>{_pair(key, value)}</li>" for key, value in _flat(group.keys).items())
    common = f'<p>The same in all runs:</p><ul class="pairs">{same}</ul>' if same else ""
    return differs + common or "<p>Not recorded.</p>"


def environment(group: Group) -> str:
    """Machine, versions and numeric flags: once where all runs agree, else with the modes."""
    runs = [run for row in (group.baseline, *group.rows) for run in row.arm.runs]
    labels = [row.arm.label for row in (group.baseline, *group.rows) for _ in row.arm.runs]
    found = [{**_flat(run.environment), **_flat({"flags": run.flags})} for run in runs]
    items, differing = [], []
    for key in dict.fromkeys(key for values in found for key in values):
        where: dict[str, list[str]] = {}
        for label, values in zip(labels, found, strict=True):
            if key in values:
                where.setdefault(_text(values[key]), []).append(label)
        if len(where) == 1:
            items.append(f"<li><code>{escape(key)}={next(iter(where))}</code></li>")
            continue
        texts = [
            f"<code>{value}</code> ({escape(', '.join(dict.fromkeys(names)))})"
            for value, names in where.items()
        ]
        differing.append(f"<li><code>{escape(key)}</code>: {'; '.join(texts)}</li>")
    text = f'<ul class="pairs">{"".join(items)}</ul>' if items else ""
    if differing:
        text = f"<p>Not the same in all runs:</p><ul>{''.join(differing)}</ul>{text}"
    return text or "<p>Not recorded.</p>"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _pair(key: str, value: Any) -> str:
    return f"<code>{escape(str(key))}={_text(value)}</code>"


def _text(value: Any) -> str:
    """As in the configuration files."""
    if value is None:
        return "null"
    return escape(str(value).lower() if isinstance(value, bool) else str(value))
