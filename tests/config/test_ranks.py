"""Settings that several ranks cannot compute are refused in one line that says what to change."""

import pytest

from mprun.config.compose import compose_config
from mprun.errors import BadInput

from ..helpers import raises_line

IMAGES = "model=resnet50 train.accumulate=4"
LM = "model=lstm_lm data.batch_size=20"
TREE = "precision.reduce_dtype=bf16 precision.reduce_order=tree"
GPT = "model=gpt train.accumulate=3"
DDP = f"{IMAGES} devices=2 dist.order=fixed dist.engine=ddp"


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "overrides",
    [
        f"{IMAGES} devices=2",
        f"{DDP} {TREE} precision=amp",
        f"{IMAGES} devices=2 nodes=2",
        f"{IMAGES} devices=auto",
        f"{IMAGES} {TREE}",
        f"{IMAGES} {TREE} devices=2 dist.order=fixed",
        f"{LM} devices=4",
        f"{GPT} devices=3 data.batch_size=2",
        f"{GPT} devices=3 precision=fp16_master_scaled scaler=logmax",
        f"{GPT} devices=3 precision=fp16_master_scaled precision.reduce_dtype=fp16",
        "model=dcgan train.accumulate=2 devices=2 scaler=dynamic scaler.per=optimizer",
    ],
)
def test_what_ranks_compute(overrides):
    compose_config(overrides.split())


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (f"{IMAGES} devices=8", "8 ranks share out train.accumulate=4 micro-batches; use train."),
        ("model=resnet50 devices=2", "or data.batch_size=16 train.accumulate=2 (32)"),
        (f"{IMAGES} devices=2 nodes=3", "devices=2 nodes=3: 6 ranks"),
        (f"{GPT} devices=2", "2 ranks share out train.accumulate=3 micro-batches; use train."),
        (f"{LM} devices=3", "share out data.batch_size=20 streams; use data.batch_size=21"),
        (f"{LM} devices=2 scaler=logmax", "scaler=logmax follows the largest gradient"),
        (
            f"{LM} devices=2 train.accumulate=2 precision.reduce_dtype=fp16",
            "precision.reduce_dtype would depend",
        ),
        ("model=dcgan train.accumulate=2 precision.reduce_dtype=fp16", "has two losses"),
        (f"{LM} model.sampled_softmax=8 optim=adagrad devices=2", "model.sampled_softmax"),
        (f"{IMAGES} devices=2 train.compile=default", "train.compile=default: must be off"),
        (f"{IMAGES} devices=2 train.cuda_graph=on device=cuda", "train.cuda_graph=on"),
        (f"{IMAGES} devices=2 numerics=probes numerics.shadow_every=2", "shadow_every=2: must"),
        (f"{DDP} precision=bf16_kahan", "ddp: precision=bf16_kahan adds up gradients of 16-bit w"),
        (
            f"{DDP} precision.reduce_dtype=bf16 precision.reduce_order=ring",
            "dist.engine=ddp: precision.reduce_order=ring adds buckets that are the same on any",
        ),
        (f"{IMAGES} devices=2 dist.engine=ddp scaler=logmax", "dist.engine=ddp: scaler"),
        (f"{IMAGES} {TREE} devices=2", "precision.reduce_order=tree: devices=2 add in the lib"),
        ("devices=0", "devices=0: must be a whole number from 1 to 1024, or auto"),
        ("devices=1.5", "devices=1.5: must be"),
        ("devices=auto device=cpu", "devices=auto: counts GPUs"),
        ("nodes=0", "nodes=0"),
        ("restarts=-1", "restarts=-1"),
        ("dist.timeout_s=0", "dist.timeout_s=0"),
    ],
)
def test_what_they_do_not(overrides, told):
    with raises_line(BadInput, told):
        compose_config(overrides.split())
