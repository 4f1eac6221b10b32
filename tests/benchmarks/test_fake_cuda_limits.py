"""Who takes part in `benchmarks.fake_cuda_limits`, and what its page says."""

from argparse import Namespace

import torch

from benchmarks.fake_cuda_limits import LABELS, case_of, contenders, page, table
from benchmarks.suite.models import GPU_SUITE


def test_every_model_beside_its_peers():
    everyone = [*contenders(Namespace(only="", eager=False, modes=None))]
    assert {group.label for group, *_ in everyone} == set(LABELS)
    gpt = {(mode, name) for group, mode, name in everyone if group.label.startswith("GPT")}
    assert ("fp8_rowwise", "torchao+") in gpt and ("amp_bf16", "mprun compiled") in gpt
    options = Namespace(only="", eager=True, modes=["fp8_rowwise"])
    eager = {name for *_, name in contenders(options)}
    assert eager == {"mprun", "torchao"}


def test_a_compiled_case_has_the_memory_format_of_its_peers():
    groups = {group.label: group for group in GPU_SUITE}
    case = case_of(groups["ResNet-50 b256"], "amp", "mprun compiled", None)
    train = case.config("device=cuda").train
    assert (train.compile, train.channels_last, train.cuda_graph) == ("default", "off", "off")
    assert case.contender == "mprun"
    short = case_of(groups["GPT-2 b12"], "amp_bf16", "mprun", 2).config("device=cuda")
    assert short.model.num_layers == 2 and short.model.hidden_size == 768


def test_the_page_has_a_line_of_each_contender():
    place = {"label": "toy", "mode": "amp", "contender": "amp", "why_not": None}
    counts = {"torch": 5.0, "triton": 0.0, "library": 3.0, "copies": 1.0, "launches": 9.0}
    row = place | counts | {"bytes": 2e6, "flops": 3e9, "ms": 0.5, "limit_ms": 0.25}
    lacks = place | {"contender": "torchao", "why_not": "the package torchao is not installed"}
    text = table([row, lacks])
    assert "torch.amp" in text and "5 + 0 + 3 + 1" in text and "is not installed" in text
    about = dict.fromkeys(("date", "machine", "python", "this", "command"), "x")
    assert text in page(about | {"torch": torch.__version__}, [row, lacks])
