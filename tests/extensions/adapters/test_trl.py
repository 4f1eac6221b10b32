"""The trainers of trl in a precision mode: SFT and DPO, of all weights and of adapters."""

import warnings
from itertools import count

import pytest
import torch

from ...helpers import assert_same_bits
from .trainers import Seen, assert_same_end, run_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their imports
    trl, peft, datasets, transformers, tokenizers = (
        pytest.importorskip(name, reason=f"needs {name}")
        for name in ("trl", "peft", "datasets", "transformers", "tokenizers")
    )
    from trl.trainer import dpo_trainer, sft_trainer  # noqa: F401 - they are loaded when asked for

    from mprun.extensions.adapters.transformers import PrecisionPart

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
TRAINERS = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    """Name data sets by numbers: what they are hashed with cannot pickle every pyarrow's types."""
    numbers = count()
    own = classmethod(lambda _, value: f"{next(numbers):016x}")
    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", own)


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(60))]
    table = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>")
    made = tokenizers.Tokenizer(table)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids))


def words(first, last, step=1):
    return " ".join(f"w{n % 60}" for n in range(first, last, step))


def data(kind):
    starts = [7 * n % 60 for n in range(32)]
    if kind == "sft":
        return datasets.Dataset.from_dict({"text": [words(n, n + 6 + n % 9) for n in starts]})
    rows = {
        "prompt": [words(n, n + 4) for n in starts],
        "chosen": [" " + words(n + 4, n + 9) for n in starts],
        "rejected": [" " + words(n + 9, n + 4, -1) for n in starts],
    }
    return datasets.Dataset.from_dict(rows)


class Seeding(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


def trained(folder, kind, mode, lora=False, resume=None, **settings):
    trainer, config = TRAINERS[kind]
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "bf16": False,  # trl's own default is True
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_length": 32,
        "eval_strategy": "steps",
        "eval_steps": 3,
    } | settings
    given = {"model": llama(), "args": config(output_dir=str(folder), **settings)}
    given |= {"train_dataset": data(kind), "eval_dataset": data(kind), "callbacks": [Seeding()]}
    given |= {"processing_class": tokenizer()}
    if lora:
        given["peft_config"] = peft.LoraConfig(**LORA)
    elif kind == "dpo" and not settings.get("precompute_ref_log_probs"):
        given["ref_model"] = llama()
    if mode is None:
        own = type("Plain", (Seen, trainer), {})(**given)
    else:
        own = type("Own", (Seen, PrecisionPart, trainer), {})(**given, precision=mode)
    own.train(resume_from_checkpoint=resume)
    return own


CASES = [
    ("sft", {}),
    ("sft", {"lora": True}),
    ("sft", {"packing": True}),
    ("sft", {"loss_type": "dft", "gradient_accumulation_steps": 2}),
    ("sft", {"gradient_checkpointing": False}),
    ("dpo", {}),
    ("dpo", {"lora": True}),
    ("dpo", {"precompute_ref_log_probs": True}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
]


@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
def test_fp32_is_trls_own_training(kind, how, tmp_path):
    plain, own = trained(tmp_path, kind, None, **how), trained(tmp_path, kind, "fp32", **how)
    assert_same_end(own.losses, own.model, plain.model, plain.losses)
    evaluations = [
        [row["eval_loss"] for row in one.state.log_history if "eval_loss" in row]
        for one in (own, plain)
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp_bf16", "fp8_tensorwise"])
def test_dpo_begins_where_model_and_reference_agree(mode, lora, tmp_path):
    """In the mode too: a reference in FP32 would differ by what the mode rounds."""
    own = trained(tmp_path, "dpo", mode, lora=lora)
    assert torch.equal(own.losses[0], -torch.nn.functional.logsigmoid(torch.zeros(())))
    assert {value.dtype for value in own.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_a_resumed_training_goes_on_as_if_never_stopped(mode, kind, lora, tmp_path):
    often = {"save_strategy": "steps", "save_steps": 3, "lora": lora}
    whole = trained(tmp_path, kind, mode, **often)
    again = trained(tmp_path, kind, mode, resume=str(tmp_path / "checkpoint-3"), **often)
    assert_same_end(again.losses, again.model, whole.model, whole.losses[3:])
    states = [[*one.optimizer.state_dict()["state"].values()] for one in (again, whole)]
    assert_same_bits(*states)


def test_the_bf16_that_trl_sets_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"SFTConfig\(bf16=True\): must be unset \(bf16=False\)"):
        trained(tmp_path, "sft", "amp", bf16=None)


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path, monkeypatch):
    run_page("trl.md", tmp_path, monkeypatch)
