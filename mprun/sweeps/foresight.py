"""The line before a sweep's first run that says which margins its seeds could show."""

from mprun.config.compose import compose_config
from mprun.record.keys import flat, recorded_keys
from mprun.sweeps.plan import Plan

_MANY = 10  # seeds that are told beside those of a sweep with fewer


def foresight(planned: Plan) -> str | None:
    """Return what the seeds can show by the scatter that is stated or recorded, if one is."""
    modes = {cell.mode for cell in planned.cells}
    config = compose_config(planned.cells[0].overrides, planned.config_dir)
    keys = flat(config.as_dict())
    if keys["compare.baseline"] not in modes or len(modes) < 2:
        return None
    # Here: these load numpy.
    from mprun.comparison.equivalence import ALPHA, FEWEST_SEEDS
    from mprun.comparison.foresight import earlier_scatter, stated_scatter
    from mprun.comparison.looks import spent_alphas

    if (until := planned.until) is not None:
        alphas = spent_alphas(until.first, until.most)
        looks = [(until.first, alphas[0]), (until.most, alphas[-1])]
    else:
        count = max(FEWEST_SEEDS, len({cell.seed for cell in planned.cells}))
        looks = [(n, ALPHA) for n in dict.fromkeys((count, max(count, _MANY)))]
    if (sd := keys.get("compare.pair_sd")) is not None:
        metric = recorded_keys().metric_of(keys, keys["compare.metric"])
        return None if metric is None else stated_scatter(sd, metric, looks)
    folders = sorted({cell.directory.parent for cell in planned.cells})
    return earlier_scatter(folders, keys, modes, looks)
