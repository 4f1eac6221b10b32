"""Single cells of the tables of a bench; "-" for what was not measured."""

_PHASES = ("data", "forward", "backward", "update")


def number(value: float | None, form: str) -> str:
    """The value in a format, or a dash."""
    return "-" if value is None else format(value, form)


def significant(value: float) -> str:
    """Four digits with thousands separated: 12,340 or 0.1234."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def rate_text(row: dict) -> str:
    """Median [quartiles] and n of samples per second, with the unit."""
    rate = row["summary"]["rate"]
    quartiles = f"[{significant(rate['q1'])}, {significant(rate['q3'])}]"
    unit = row["facts"]["build"]["sample"]
    return f"{significant(rate['median'])} {quartiles} {unit}s/s, n={rate['n']}"


def ratio_text(row: dict, name: str) -> str:
    """A ratio of the summary with its interval."""
    found = row["summary"]["ratios"].get(name)
    if found is None:
        return "-"
    mark = "" if found["paired"] else "~"
    text = f"{mark}{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{text} {found['peer']}" if "peer" in found else text


def share_text(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def bytes_text(value: float | None) -> str:
    """MiB."""
    return "-" if value is None else f"{value / 2**20:,.1f}"


def split_text(details: dict) -> str:
    """The phases of a step in percent, or why there are none."""
    found = details.get("time_split")
    if not found:
        return "-"
    if "why_not" in found:
        return found["why_not"]
    return " / ".join(f"{100 * found[phase] / found['step']:.0f}" for phase in _PHASES)
