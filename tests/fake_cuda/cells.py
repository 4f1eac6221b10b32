"""The fake device runs these models and modes, with these exceptions."""

from mprun.precision import get_policy

from ..execution.trained import SMALL, TOKENS
from ..shipped import MODES as OTHER_MODES

__all__ = ["MODELS", "MODES", "STEPS", "overrides", "refusal"]

# Of those in blocks these two; the compiler takes a third of the time for the last one.
MODES = [*OTHER_MODES, "nvfp4", "fp8_block"]
STACKED = [*TOKENS, "model.embedding_size=8", "model.hidden_size=8", "model.num_layers=2"]
FORWARD = ["model.bidirectional=false", "model.row_convolution=3"]
FORWARD += ["model.fully_connected=8", "model.num_layers=2"]
# Batches as for ResNet-50: BatchNorm over maps of one pixel.
NARROW = ["model.width=0.0625", "optim=sgd", "optim.lr=1e-3", "data=synthetic_images"]
NARROW += ["data.batch_size=8", "data.train_size=32", "data.eval_size=8"]
MANUAL = ["model.num_heads=2", "model.attention=manual"]
MIXED = ["model.hidden_size=16", "model.num_experts=4", "model.expert_size=16"]
MIXED += ["model.balancing=bias", "model.shared_size=16", "model.capacity=1.5"]
MODELS = {
    "alexnet": SMALL["dropout"],
    "resnet50": SMALL["batch_norm"],
    "resnet50_preact": ["model=resnet50_preact", *NARROW],
    "vgg16": ["model=vgg16", *NARROW],
    "googlenet": ["model=googlenet", *NARROW],
    "inception_v2": ["model=inception_v2", *NARROW],
    "inception_v3": ["model=inception_v3", *NARROW, "data.image_size=75"],
    "lstm_lm": SMALL["language_model"],
    "lstm_lm, 2 layers, dropout": ["model=lstm_lm", *STACKED, "model.dropout=0.3"],
    "lstm_lm_projected": ["model=lstm_lm_projected", *STACKED, "model.projection_size=4"],
    "biglstm": SMALL["sampled"],
    "gpt": SMALL["transformer"],
    "gpt, manual": ["model=gpt", *TOKENS, "model.hidden_size=8", *MANUAL],
    "gpt_llama": ["model=gpt_llama", *TOKENS, "model.hidden_size=16"],
    "gpt_moe": ["model=gpt_moe", *TOKENS, *MIXED],  # in the form that does not wait
    "seq2seq": SMALL["translation"],
    "dcgan": SMALL["gan"],
    "conv_autoencoder": SMALL["reconstruction"],
    "deep_speech2": SMALL["speech"],
    "deep_speech2, forward": [*SMALL["speech"], *FORWARD],
    "ssd_mini": SMALL["detection"],
    "faster_rcnn": SMALL["two_stages"],
}
STEPS = 12  # 3 to warm up, then with a graph 9 replays

# Layers that FP8 could take: linear, not the output.
WITH_LINEAR = {"alexnet", "vgg16", "googlenet", "gpt", "gpt, manual", "gpt_llama", "gpt_moe"}
WITH_LINEAR |= {"seq2seq", "deep_speech2, forward", "faster_rcnn"}
NO_LINEAR = "no nn.Linear is left|the model has none"
WAITS = "only the device knows how many"


def refusal(model: str, mode: str, graph: str) -> str | None:
    """The whole list of exceptions: what `mprun` says of a cell that it refuses."""
    if get_policy(mode).matmul is not None and model not in WITH_LINEAR:
        return NO_LINEAR
    if graph == "on" and model == "faster_rcnn":
        return WAITS
    return None


def overrides(model: str, mode: str, graph: str) -> list[str]:
    """The command line of a cell."""
    # A checkpoint of AlexNet takes seconds to write and to hash.
    checkpoints = 0 if model == "alexnet" else 6
    return [
        *MODELS[model],
        f"precision={mode}",
        f"train.cuda_graph={graph}",
        f"train.steps={STEPS}",
        "train.log_every=4",
        "train.eval_every=6",
        f"train.checkpoint_every={checkpoints}",
    ]
