"""The command line of `mprun bench --roofline`: what it prints, what it refuses."""

import json

import pytest

from mprun.errors import BadInput
from mprun.extensions.bench.roofline.command import DEFAULT_MODES, main, parse
from mprun.extensions.bench.roofline.count import count

from ...helpers import raises_line, refused

SMALL = ["model=lstm_lm", "data=synthetic_tokens", "data.batch_size=4"]


@pytest.mark.slow
def test_table_and_notes(capsys):
    assert main([*SMALL, "--mode", "fp32,amp", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "The rates are limits, computed from counted operations and not measured" in text
    assert "on H200" in text and "amp: the 3 most expensive" in text
    rows = text.partition("amp: the 3 most expensive")[2].strip().splitlines()
    assert len(rows) == 2 + 3
    assert "| amp " in text and "tf32 |" in text


@pytest.mark.slow
def test_json_by_mode(capsys):
    assert parse(["--top", "model=dcgan"]).top == 10
    assert main([*SMALL, "--json", "--gpu=A100", "--mode", "tf32,fp32,tf32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["modes"]) == ["tf32", "fp32"]
    assert found["samples_per_step"] == 4 * 20
    tf32, fp32 = found["modes"].values()
    assert tf32["speedup_limit"]["fp32"] == tf32["eager"] / fp32["eager"]
    assert fp32["memory"]["total"] == sum(v for k, v in fp32["memory"].items() if k != "total")


@pytest.mark.slow
def test_utterances_of_the_longest_length(capsys):
    """6 FLOP a weight and frame: 836 frames of 1,671 behind the first stride."""
    arguments = ["experiment=deep_speech2_librispeech", "data.batch_size=1", "--json"]
    assert main([*arguments, "--mode", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)["modes"]["fp32"]
    weights = 7680 * (1312 + 2560) + 2 * 7680 * 5120 + 2560 * 2560 + 2560 * 29 + 2560 * 20
    convolved = 32 * 451 * 81 * 2 / 3 + 32 * 32 * 231 * 41  # the first has no gradient of its input
    assert found["flops_per_sample"] == pytest.approx(6 * 836 * (weights + convolved), rel=1e-3)
    with pytest.raises(BadInput, match="data.max_seconds=null: only the files of data=speech"):
        main([*arguments, "data.max_seconds=null"])


@pytest.mark.slow
def test_modes_that_a_gpu_lacks_are_left_out_with_the_reason(capsys):
    assert main([*SMALL, "--gpu", "V100"]) == 0
    text = capsys.readouterr().out
    shown = [mode for mode in DEFAULT_MODES if f"| {mode} " in text]
    assert shown == ["fp32", "fp16_master_scaled", "amp"]
    assert "Without tf32: V100 has no TF32 products" in text
    assert "Without bf16_master: V100 has no BF16 products" in text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpu", "B200"], "--gpu B200: unknown"),
        (["--gpu", "cpu"], "allowed: H200, H100, A100, V100"),
        (["--gpu"], "--gpu: needs a value"),
        (["--gpu", "V100", "--mode", "tf32"], "V100 has no TF32 products"),
        (["--gpu", "V100", "precision=bf16_naive"], "V100 has no BF16 products"),
        (["--mode", "amp", "precision=fp32"], "use one of the two"),
        (["--mode", "fp8"], "--mode fp8: unknown"),
        (["--ranks", "0", "--link", "nvlink"], "--ranks 0: must be whole numbers from 1 to 65536"),
        (["--ranks", "8,", "--link", "nvlink"], "--ranks : must be"),
        (["--ranks", "8,x", "--link", "nvlink"], "--ranks x: must be"),
        (
            ["--ranks", "8,12", "--link", "nvlink"],
            "--ranks 12 --link nvlink: a node with this link has 8 GPUs",
        ),
        (["--ranks", "8"], "--ranks 8: needs --link (allowed: nvlink, nvlink3, 100gbe, 25gbe, or"),
        (["--link", "nvlink"], "--link nvlink: is only allowed with --ranks"),
        (["--ranks", "8", "--link", "wifi"], "--link wifi: unknown (allowed: nvlink, nvlink3"),
        (["--ranks", "8", "--link", "25gb"], "did you mean '25gbe'?"),
        (["--ranks", "8", "--link", "0"], "--link 0: unknown"),
        (["--ranks", "8", "--link", "nan"], "GB/s of a GPU from 0.01 to 10000"),
        (["--ranks=8", "--link=1", "--top"], "--top 10: is not allowed together with --ranks"),
        *((["--top", top], f"--top {top}: must be a number from 1 to 100") for top in ("0", "101")),
        (["--top=-1"], "--top -1: must be a number from 1 to 100"),
        (["--top=many"], "--top many: must be a number from 1 to 100"),
        (["--fast"], "--fast: unknown option"),
        (["resnet"], "neither an option nor key=value"),
        (["device=cpu"], "device=cpu"),
        (["model=resnet50", "data=image_folder"], "set model.num_classes=N"),
        (["data=text"], "set model.vocab_size=N or data.vocab_limit=N"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    with raises_line(BadInput, message):
        main(arguments)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--roofline", "--gpu", "cpu"], "a roofline needs the name of a GPU"),
        (["--ranks", "8"], "mprun: bench --ranks: goes with --roofline"),
        (["--ranks=8", "8"], "mprun: bench --ranks=8: goes with --roofline"),
        (["--link", "8"], "mprun: bench --link: goes with --roofline"),
    ],
)
def test_reached_through_mprun_bench(words, line, capsys):
    refused(capsys, "bench", *words, says=line)


@pytest.mark.slow
def test_several_ranks_in_80_columns(capsys):
    several = ["data.batch_size=8", "train.accumulate=2", "precision.reduce_dtype=fp16"]
    ranks = ["--ranks", "1,65536", "--link", "nvlink", "--mode", "amp"]
    assert main([*SMALL, *several, *ranks]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "320 tokens a rank, H200, --link nvlink" in text
    assert "sums in fp16" in text and "| 65,536 | 8,192 | fp16 |" in text
    for assumption in ("not measurements", "nccl-tests#212", "hops of 8 us", "dist.bucket_mb"):
        assert assumption in text


def test_json_of_ranks(capsys):
    words = [*SMALL, "--json", "precision=amp"]
    assert main([*words, "--ranks", "2,4", "--link", "12.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranks = found.pop("ranks")
    assert [row["ranks"] for row in ranks["modes"]["amp"]["rows"]] == [2, 2, 4, 4]
    assert ranks["link"]["between"] == 12.5e9
    assert main(words) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(found)


IMAGES = ["data.value_range=tanh", "data.batch_size=128"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, samples",
    [
        (["model=alexnet", "data=imagenet", "data.batch_size=256"], 256),
        (["model=lstm_lm", "data=lm1b", "data.batch_size=128"], 128 * 20),
        (["model=gpt", "data=token_files", "data.batch_size=128"], 128 * 1024),
        (["model=lstm_lm", "data=text", "data.vocab_limit=10", "data.batch_size=20"], 20 * 35),
        (["data=image_folder", "data.layout=flat", "data.image_size=64", "model=dcgan"], 128),
        (["model=conv_autoencoder", "data=cifar10"], 128),
    ],
)
def test_data_that_lie_in_files_need_no_files(overrides, samples):
    images = IMAGES if samples == 128 else []
    assert count([*overrides, *images], "fp16_master").samples == samples
