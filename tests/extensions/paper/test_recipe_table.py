"""The table of docs/recipes.md beside the paper has the numbers of the recipes."""

import pytest

from mprun.config.compose import compose_config
from mprun.config.option_files import conf_dir
from mprun.extensions.paper.rows import ROWS

PAGE = (conf_dir().parent / "docs" / "recipes.md").read_text(encoding="utf-8")
LINES = PAGE.split("## Differences from the paper")[1].split("\n## ")[0].splitlines()
CELLS = [[*map(str.strip, line.split("|"))] for line in LINES if line.startswith("| `")]
TABLE = {name.strip("`"): cells for _, name, *cells, _ in CELLS}


def test_it_has_every_recipe_of_the_paper_and_every_cell():
    assert list(TABLE) and set(TABLE) == {row.full.experiment for row in ROWS if row.full}
    assert all(len(cells) == 8 and all(cells) for cells in TABLE.values())


@pytest.mark.slow  # 0.2 s each
@pytest.mark.parametrize("recipe", TABLE)
def test_batch_length_rate_and_decay(recipe):
    config = compose_config([f"experiment={recipe}"], files=False).config
    train, size = config.train, config.data.batch_size
    batch, length, rate, decay, *_ = TABLE[recipe]
    assert batch == (f"{train.accumulate} x {size}" if train.accumulate > 1 else f"{size}")
    said = f"{train.epochs:g} epochs" if train.steps is None else f"{train.steps:,} steps"
    assert length == said
    assert [float(rate), float(decay)] == [config.optim.lr, config.optim.weight_decay]
