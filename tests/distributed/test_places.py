"""Which rank a process is: what torchrun and srun say, and what contradicts itself."""

import pytest

from mprun.distributed.rank_info import RankInfo, completed, first_host, rank_info_from
from mprun.errors import BadInput

from ..helpers import raises_line

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4242", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SRUN |= {"SLURM_JOB_NODELIST": "gpu[003-004]"}


def test_torchrun_and_srun():
    assert rank_info_from(TORCHRUN) == RankInfo(5, 1, 1, 2, 4, "node1", 29500, served=True)
    assert rank_info_from(SRUN) == RankInfo(
        5, 1, 1, 2, 4, "gpu003", 24242, served=False, job="4242.0"
    )


def test_what_torchrun_starts_a_rank_with_is_read_back():
    place = rank_info_from(TORCHRUN)
    for rank in range(4):
        found = rank_info_from(place.environment(rank))
        assert (found.rank, found.local_rank, found.world) == (4 + rank, rank, 8)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_one_process(environ):
    assert rank_info_from(environ) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[003-010,012],login", "gpu003"), ("a,b", "a"), ("node7", "node7"), ("n[1,3]", "n1")],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK=8: must be below WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
        ({**TORCHRUN, "RANK": "x"}, "RANK=x"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**TORCHRUN, "WORLD_SIZE": "7"}, "WORLD_SIZE=7: must be a multiple"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4: must be below"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "numbered machine by machine"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"}, "WORLD_SIZE: is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR: is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, "RANK: is not set"),
        ({**SRUN, "SLURM_NTASKS": "7"}, "SLURM_NTASKS=7"),
        ({**SRUN, "SLURM_PROCID": "1"}, "SLURM_PROCID=1"),
        ({**SRUN, "SLURM_JOB_NODELIST": ""}, "names no machine"),
    ],
)
def test_contradictions(environ, named):
    with raises_line(BadInput, named):
        rank_info_from(environ)


def test_the_overrides_get_the_numbers():
    overrides, place = completed(["seed=1"], rank_info_from(TORCHRUN))
    assert overrides == ("seed=1", "devices=4", "nodes=2")
    assert place.rank == 5
    assert completed(["devices=auto"], rank_info_from(TORCHRUN))[0][1:] == ("nodes=2",)


@pytest.mark.parametrize("given", ["devices=8", "nodes=1"])
def test_overrides_that_say_otherwise(given):
    with pytest.raises(BadInput, match="the environment has 2 x 4 ranks"):
        completed([given], rank_info_from(TORCHRUN))


def test_one_process_for_all_devices_of_a_machine():
    one_each = {**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    overrides, place = completed(["devices=8"], rank_info_from(one_each))
    assert (place.rank, place.node, place.world) == (None, 1, 16)
    assert overrides == ("devices=8", "nodes=2")
    assert rank_info_from(place.environment(3)).rank == 11
