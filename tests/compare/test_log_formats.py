"""Logs in the form in which other tools write them, a few lines of each."""

import pytest

from mprun.compare.external_logs import load_foreign
from mprun.compare.log_formats import read_logs
from mprun.errors import BadInput

EXPORT = (
    '"Step","fp32-0 - _step","fp32-0 - loss","fp32-0 - loss__MIN","fp32-0 - loss__MAX",'
    '"amp-0 - loss","amp-0 - loss__MIN","amp-1 - loss"\n'
    '"1","1","0.5","0","0","0.6","0","0.7"\n"2","2","0.25","0","0","","",""\n'
)


def test_all_runs_of_an_export_stand_in_one_file(tmp_path):
    export = tmp_path / "wandb.csv"
    export.write_text(EXPORT)
    logs = read_logs(export, "loss")
    assert [log.run for log in logs] == ["fp32-0", "amp-0", "amp-1"]
    assert [log.points.tolist() for log in logs] == [[[1, 0.5], [2, 0.25]], [[1, 0.6]], [[1, 0.7]]]
    assert logs[1].name == f"{export}#amp-0"
    group = load_foreign([f"fp32={export}#amp-0", f"amp={export}#amp-[1-9]"], "loss", step="Step")
    assert [run.path for run in group.arms[0].runs] == [f"{export}#amp-1"]
    with pytest.raises(BadInput, match="no run of that name; has fp32-0, amp-0, amp-1"):
        load_foreign([f"fp32={export}#bf16-*", f"amp={export}#amp-*"], "loss")
    with pytest.raises(BadInput, match="fp32-0: listed twice"):
        load_foreign([f"fp32={export}", f"amp={export}#fp32-0"], "loss")


def test_any_column_can_count_the_steps(tmp_path):
    log = tmp_path / "a.csv"
    log.write_text(",frames,loss\n0,100,0.5\n1,200,0.25\n")
    with pytest.raises(BadInput, match="no column 'step' or 'epoch'; has frames, loss; say with"):
        read_logs(log, "loss")
    assert read_logs(log, "loss", "frames")[0].points.tolist() == [[100, 0.5], [200, 0.25]]
    with pytest.raises(BadInput, match="--step frame: not there; has frames, loss"):
        read_logs(log, "loss", "frame")


def test_epochs_are_not_compared_with_steps(tmp_path):
    for name in ("epoch", "step"):
        (tmp_path / f"{name}.csv").write_text(f"{name},loss\n1,2\n2,1\n")
    with pytest.raises(BadInput, match=r"epoch.csv: counts epoch, .*step.csv step: must be the sa"):
        load_foreign([f"fp32={tmp_path / 'epoch.csv'}", f"amp={tmp_path / 'step.csv'}"], "loss")
