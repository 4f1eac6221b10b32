"""Bad input: exit code 2, one line of at most 200 characters with the key, nothing written."""

import os
import random
import shlex

import pytest
import torch

from mprun.cli import main
from mprun.cli.dispatch import _one_line
from mprun.errors import shortened

from ..helpers import refused
from ..tables import with_extensions

# Command lines (shell quoting), and below each what its one line must contain.
LONG = """\
data=digits
    did you mean 'digits_224', 'digits_32' or 'digits_64'?|... (mprun --help data)
precision=foo
    precision=foo: must be one of amp, amp_bf16, bf16_*, fp16_*, fp32, fp8_*, int8_rowwise, \
|nvfp4 ... (mprun --help precision)
train.steps=10 precision.switch=[{at:10,to:fp16_master}]
    precision.switch: at=10: is step 10 of 10, must be one of 1 to 9
train.steps=10 precision.switch=[{at:0.5,to:fp16_master},{at:4,to:fp32}]
    precision.switch: at=4: is step 4, must be after that before it, 5
precision.switch=[{at:0.5,to:fp16_master},{at:0.7,to:fp16_master}]
    precision.switch: to=fp16_master: is the mode before it
precision.switch=[{at:0.5,to:{fp32_math:tf32}}] device=cpu
    precision.switch: to=fp32: precision=fp32: TF32 needs a GPU
model=lstm_lm data=synthetic_tokens precision.switch=[{at:0.5,to:bf16_naive}]
    precision.switch: to=bf16_naive: bf16_naive has no FP32 master weights
model=lstm_lm data=synthetic_tokens precision=bf16_master \
precision.switch=[{at:0.5,to:{update:{state_dtype:bf16}}}]
    state_dtype is bf16, but a switch of modes keeps that of bf16_master, null
model=lstm_lm data=synthetic_tokens precision=bf16_master \
precision.switch=[{at:0.5,to:{update:{square_dtype:fp16}}}]
    square_dtype is fp16, but a switch of modes keeps that of bf16_master, null
model=lstm_lm data=synthetic_tokens precision=bf16_master \
precision.switch=[{at:0.5,to:{master_dtype:bf16}}]
    master_dtype is bf16, but a switch of modes keeps that of bf16_master, fp32
precision.update.state_dtype=[fp8]
    must be one of fp32, bf16, fp16, dynamic8, fp8, or null
optim=muon optim.bias_lr_factor=4 optim.adamw_lr_factor=2e6 precision=fp16_naive
    optim.adamw_lr_factor=2e+06|FP16|at most 1.6376e+06
model=gpt precision=mxfp8 precision.matmul.high_precision=[output,grad_input,grad_weight]
    high_precision=['output', 'grad_input', 'grad_weight']: leaves no product in these
model=dcgan precision=nvfp4
    precision=nvfp4: linear layers of the mode multiply in E2M1, but the model has none (
model=gpt precision=mxfp8 "precision.matmul.modules=['!last x%']"
    precision.matmul.modules: '!last x%': must be of the form '!last 15%'
model=gpt precision=fp8_rowwise precision.matmul.input=e5m2 precision.matmul.weight=e5m2
    precision.matmul.input=e5m2: output multiplies two E5M2 operands|high_precision
model=gpt precision=fp8_tensorwise precision.matmul.weight=e5m2
    precision.matmul.grad_output=e5m2: grad_input multiplies two E5M2 operands
model=gpt precision=mxfp8 precision.matmul.granularity=1by32
    precision.matmul.granularity=1by32: must be one of none, tensor, row, or ROWSxCOLUMNS
model=gpt precision=mxfp8 precision.matmul.granularity=0x32
    precision.matmul.granularity=0x32: must be one of none, tensor, row, or ROWSxCOLUMNS
model=gpt precision=mxfp8 precision.matmul.weight_granularity=0x0
    precision.matmul.weight_granularity=0x0: must be one of none, tensor, row
model=gpt precision=fp8_unscaled precision.matmul.weight_granularity=16x16
    weight_granularity=16x16: scales are 1 for all operands or none; granularity=none
model=gpt precision=mxfp8 precision.matmul.weight_granularity=none
    weight_granularity=none: scales are 1 for all operands or none; granularity=1x32
model=gpt precision=fp8_unscaled precision.matmul.scale=e8m0
    precision.matmul.scale=e8m0: every scale is 1 with precision.matmul.granularity=none
model=gpt precision=fp8_block precision.matmul.scale_rounding=floor
    precision.matmul.scale_rounding=floor: needs precision.matmul.scale=e8m0
model=gpt precision=fp8_tensorwise precision.matmul.history=16
    precision.matmul.history=16: needs precision.matmul.scale=delayed
model=gpt precision=int8_rowwise precision.matmul.granularity=1x32
    input=int8: int8 is for all operands, with precision.matmul.granularity=tensor or row
precision.update.state_rounding=stochastic
    state_rounding=stochastic: needs precision.upd
precision=bf16_master precision.master_dtype=fp16 precision.update.rounding=stochastic
    precision.update.rounding=stochastic: needs precision.param_dtype=bf16
model=gpt precision.attention.format=e4m3
    precision.attention.format=e4m3: needs precision.param_dtype or autocast_dtype of fp16
model=gpt model.attention=manual precision=fp8_attention
    precision.attention.format=e4m3: model.attention=manual does not call F.scaled_dot_product
model=seq2seq precision=fp8_attention
    seq2seq does not call F.scaled_dot_product_attention (allowed here: null)
model=gpt precision=bf16_master precision.attention.granularity=tensor
    precision.attention.granularity=tensor: needs precision.attention.format
model=gpt precision=fp8_rowwise precision.matmul.weight=int8
    precision.matmul.input=e4m3: int8 is for all operands
model=gpt precision=mxfp4_hadamard precision.matmul.dequantized=[grad_weight]
    must be [] with output in precision.matmul.high_precision
model=gpt precision=fp8_delayed precision.matmul.granularity=row
    precision.matmul.granularity=row: must be tensor with precision.matmul.scale=delayed
model=gpt precision=fp8_delayed precision.matmul.hadamard=[grad_weight]
    hadamard=['grad_weight']: must be [] with precision.matmul.scale=delayed
model=gpt precision=nvfp4_4over6 precision.matmul.grad_output=e4m3
    precision.matmul.grad_output=e4m3: must be e2m1 with precision.matmul.scale=four_over_six
model=gpt precision=fp8_delayed precision.matmul.input=e2m1
    precision.matmul.input=e2m1: must be e4m3 or e5m2 with precision.matmul.scale=delayed
model=gpt precision=bf16_master precision.matmul.granularity=1x32
    1x32: needs precision.matmul.input, weight and grad_output, which precision=bf16_master
model=gpt precision=bf16_master precision.matmul.hadamard=[output]
    precision.matmul.hadamard=['output']: needs precision.matmul.input, weight
model=gpt precision=bf16_master precision.matmul.grad_rounding=stochastic
    precision.matmul.grad_rounding=stochastic: needs precision.matmul.input, weight
model=gpt precision=fp8_rowwise precision.products.power_of_two=true
    power_of_two: unknown key; now precision.matmul.scale: pow2 for true
model=gpt precision=fp8_rowwise precision.products.input=e5m2
    precision.products.input: unknown key; now precision.matmul.input
model=resnet50 data=docs_words
    data.name=docs_text|images; choose data=cifar10, digits_224
model=lstm_lm data=digits_32
    data.name=digits|text; choose data=docs_chars, docs_chars_64, docs_words
model=resnet50 data=image_folder data.root=. data.resize_to=223
    data.resize_to=223: must be >= data.image_size (224)
""".splitlines()
OPTIONS = {"model=resnet5": "resnet50", "precision=fp16_nave": "fp16_naive", "optim=adm": "adam"}
OPTIONS |= {"scaler=dynamik": "dynamic", "data=digit_32": "digits_32", "train=shrt": "short"}
KEYS = {"seeed": "seed", "lr": "optim.lr", "batch_size": "data.batch_size"}
KEYS["train.step"] = "train.steps"
UNKNOWN = "+optim.foo=1 ++foo.bar=1 +model._target_=os.system +seed=1 model@data=resnet50 ~optim"
UNKNOWN += " ~optim.lr"
CASES = [  # the same, where both fit in a line
    *zip(LONG[::2], map(str.strip, LONG[1::2]), strict=True),
    # unknown option of a group
    *((word, f"{word}|did you mean '{meant}'") for word, meant in OPTIONS.items()),
    # the words of others
    ("precision=16-mixed", "did you mean 'amp'? It must be one of amp, amp_bf16"),
    ("precision=fp16", "did you mean 'amp', 'fp16_master_scaled' or 'fp16_naive'?"),
    ("precision=O2", "did you mean 'fp16_master_scaled'?"),
    ("device=cuda:0", "did you mean 'cuda'?"),
    ("--lr 0.1", "--lr: unknown option; did you mean 'optim.lr=0.1'?"),
    ("--model resnet50", "did you mean 'model=resnet50'?"),
    ("resnet50", "did you mean 'model=resnet50'?"),
    ("learning_rate=0.1", "did you mean 'optim.lr'?"),
    ("epochs=3", "did you mean 'train.epochs'?"),
    ("compare " + "a" * 5000, "File name too long: aaa"),
    ("experiment=nope", "experiment=nope"),
    ("model=", "model=|alexnet"),
    ("model=null", "model=null|alexnet"),
    ("model=[a,b]", "model=|alexnet"),
    ("model=[lstm_lm]", "model=['lstm_lm']|did you mean 'lstm_lm'"),
    ("precision=[amp]", "precision=['amp']|must be one of amp, amp_bf16"),
    ("experiment=[quickstart_underflow]", "experiment=["),
    # a mode that changes
    ("precision.switch=[{at:0.5,to:bf16_mster}]", "precision.switch: to=bf16_mster|bf16_master"),
    ("precision.switch=[{at:1.5,to:fp16_master}]", "at=1.5: must be a share of the run, above 0"),
    ("precision.switch=[{at:0,to:fp16_master}]", "precision.switch: at=0|or a step from 1 on"),
    ("precision.switch=[{at:true,to:fp16_master}]", "precision.switch: at=True: must be a share"),
    ("precision.switch=[{at:0.5}]", "must be a list of {at: NUMBER, to: MODE}"),
    ("precision.switch=[{at:0.5,to:null}]", "to=None: must be a mode, or {KEY: VALUE}"),
    ("precision.switch=[{at:0.5,to:amp}]", "to=amp: needs a loss scale|choose scaler=dynamic"),
    ("precision.switch=[{at:0.5,to:{products:{input:e4m3}}}]", "now precision.matmul.input"),
    ("precision.switch=[{at:0.5,to:{grad_dtype:7}}]", "precision.grad_dtype=7: must be one of"),
    ("precision.switch=[{at:0.5,to:{norms:fp32}}]", "to={norms: ...}: no key of a mode"),
    (
        "model=lstm_lm data=synthetic_tokens precision.switch=[{at:0.5,to:mxfp8}] device=cpu "
        "precision.overrides.*=fp32 precision=bf16_master",
        "precision.switch: to=mxfp8: ",
    ),
    # unknown key
    ("modle=resnet50", "modle|did you mean 'model'"),
    *((f"{key}=1", f"{key}|did you mean '{meant}'") for key, meant in KEYS.items()),
    ("model=resnet50 model.hidden_size=3", "model.hidden_size"),
    *((word, word.lstrip("+").partition("=")[0]) for word in UNKNOWN.split()),
    # not a value to set: the option of the group sets it
    ("model.name=resnet50", "model.name|model=OPTION"),
    ("precision.name=amp", "precision.name|precision=OPTION"),
    ("scaler.name=static", "scaler.name|scaler=OPTION"),
    ("scaler.kind=dynamic", "scaler.kind|scaler=OPTION"),
    # wrong type
    ("optim.lr=abc", "optim.lr=abc: must be a number > 0 (learning rate"),
    ("optim.betas=x", "optim.betas=x: must be a list of numbers >= 0 and < 1, or null"),
    ("precision.matmul.margin=abc", "margin=abc: must be a whole number >= 0 and <= 64"),
    ("precision.matmul.history=1.5", "history=1.5: must be a whole number >= 1"),
    ("precision.matmul.history=1e20", "<= 1,000,000 (with scale=delayed: number of past updates"),
    ("precision.matmul.granularity=null", "must be text (block with one scale: tensor, row"),
    ("precision.matmul.modules=[[a]]", "=[['a']]: must hold neither lists nor mappings"),
    ("optim.average_modules=[{a:1}]", "optim.average_modules=[{'a': 1}]: must hold neither lists"),
    ("precision.matmul.hadamard=x", "x: must be a list of output, grad_input, grad_weight"),
    ("precision.attention.format=int8", "attention.format=int8: must be one of e4m3, e5m2, null"),
    ("precision.update.state_dtype=int8", "must be one of fp32, bf16, fp16, dynamic8, fp8, null"),
    ("optim.lr=true", "optim.lr=true"),
    ("optim.lr=[1]", "optim.lr"),
    ("optim.lr=", "optim.lr="),
    ("optim.lr=null", "optim.lr=null"),
    ("train.steps=ten", "train.steps=ten"),
    ("train.steps=1.5", "train.steps=1.5"),
    ("deterministic=7x", "deterministic=7x: must be true or false"),
    ("name={a:1}", "name="),
    ("optim=adam optim.betas=0.9", "optim.betas"),
    # out of range
    ("optim.lr=0", "optim.lr=0.0|> 0"),
    ("optim.lr=-1", "optim.lr=-1.0|> 0"),
    ("optim.lr=nan", "optim.lr=nan|finite"),
    ("optim.lr=inf", "optim.lr=inf|finite"),
    ("optim.lr=1e999", "optim.lr=inf|finite"),
    ("optim.lr=1e39", "optim.lr=1e+39|FP32|at most 3e+38"),
    ("optim.lr=1e5 precision=fp16_naive", "optim.lr=100000|FP16|at most 65504"),
    ("optim=adam optim.lr=9e3 precision=fp16_naive", "optim.lr=9000|at most 6550"),
    ("optim=muon optim.adamw_lr_factor=0", "optim.adamw_lr_factor=0.0|> 0"),
    ("optim=muon optim.adamw_lr_factor=nan", "optim.adamw_lr_factor=nan|finite"),
    ("optim=muon optim.adamw_lr_factor=1e300", "optim.adamw_lr_factor=1e+300|such a rate|3e+40"),
    ("optim=sgd optim.bias_lr_factor=1e300", "optim.bias_lr_factor=1e+300|such a rate|at most"),
    ("optim.weight_decay=1e6 precision=fp16_naive", "optim.weight_decay=1e+06|at most 65504"),
    ("data.batch_size=0", "data.batch_size=0|>= 1"),
    ("data.batch_size=99999999999999999999999", "batch_size="),
    ("train.steps=0", "train.steps=0|>= 1"),
    ("train.steps=-1", "train.steps=-1|>= 1"),
    ("train.steps=1000000000000", "train.steps=1000000000000|<= 10,000,000"),
    ("train.steps=null train.epochs=1e300", "train.epochs=1e+300|<= 10000"),
    ("train.keep_checkpoints=1", "train.keep_checkpoints=1|>= 2"),
    ("train.clip_norm=0", "train.clip_norm=0.0|> 0"),
    ("seed=-1", "seed=-1|>= 0"),
    ("threads=0", "threads=0|>= 1"),
    ("threads=100000", "threads=100000|<= 1024"),
    ("device=gpu", "device=gpu: did you mean 'cuda'?|auto, cuda, cpu"),
    ("cpu_half=fast", "cpu_half=fast|emulated, native"),
    ("optim.momentum=1", "optim.momentum=1.0|< 1"),
    ("optim=adam optim.betas=[0.9,1.0]", "optim.betas=1.0|< 1"),
    ("scaler=static scaler.scale=0", "scaler.scale=0.0|>= 2^-126"),
    ("scaler=static scaler.scale=1e-45", "scaler.scale=1e-45|2^-126"),
    ("scaler=static scaler.scale=1e39", "scaler.scale=1e+39|2^126"),
    ("scaler=dynamic scaler.growth_factor=1", "scaler.growth_factor=1.0|> 1"),
    ("scaler=dynamic scaler.growth_factor=inf", "scaler.growth_factor=inf|finite"),
    ("scaler=dynamic scaler.backoff_factor=1", "scaler.backoff_factor=1.0|< 1"),
    ("scaler=dynamic scaler.backoff_factor=0", "scaler.backoff_factor=0.0|> 0"),
    ("scaler=dynamic scaler.growth_interval=0", "scaler.growth_interval=0|>= 1"),
    ("scaler=dynamic scaler.growth_interval=99999999999", "scaler.growth_interval=99999999999"),
    ("scaler=dynamic scaler.init_scale=1e30", "scaler.init_scale=1e+30|max_scale"),
    ("scaler=dynamic scaler.init_scale=1e-30", "scaler.init_scale=1e-30|min_scale"),
    ("scaler=dynamic scaler.min_scale=8 scaler.max_scale=4", "scaler.min_scale=8|max_scale"),
    # combinations that cannot be
    ("optim=muon optim.newton_schulz_dtype=null", "muon needs one of bf16, fp16, fp32"),
    ("optim=muon optim.newton_schulz_dtype=fp8", "must be one of bf16, fp16, fp32\n"),
    ("precision=tf32 device=cpu", "precision=tf32|fp32"),
    ("precision=amp cpu_half=native device=cpu", "cpu_half=native|emulated"),
    ("optim=adam optim.momentum=0.9", "optim.momentum=0.9|adam"),
    ("optim.eps=1e-8", "optim.eps=1e-08|sgd"),
    ("optim=adam optim.betas=null", "optim.betas=null|adam"),
    ("optim=adam optim.betas=[0.9]", "optim.betas=[0.9]|two"),
    ("optim.nesterov=true", "optim.nesterov=true|momentum"),
    ("optim.schedule=step", "optim.milestones"),
    ("optim.implementation=fused precision=fp16_naive", "optim.implementation=fused|foreach"),
    ("scaler.scale=128", "scaler.scale=128.0|none|scaler=static has it"),
    ("scaler=dynamic scaler.scale=4", "scaler.scale=4.0|dynamic"),
    ("scaler=dynamic scaler.growth_factor=null", "scaler.growth_factor=null"),
    ("scaler=static scaler.scale=null", "scaler.scale=null"),
    ("scaler=dynamic scaler.hysteresis=2 scaler.tolerance=0.5", "scaler.tolerance=0.5"),
    ("scaler=dynamic scaler.per=loss", "scaler.per=loss|shared, optimizer"),
    ("scaler=dynamic scaler.per=optimizer", "scaler.per=optimizer|shared"),
    ("model=dcgan scaler.per=optimizer", "scaler.per=optimizer|none"),
    ("model=dcgan train.accumulate=0", "train.accumulate=0|>= 1"),
    ("precision.reduce_dtype=fp16", "precision.reduce_dtype=fp16|train.accumulate=8"),
    ("precision.reduce_divide=before train.accumulate=2", "reduce_divide=before|reduce_dtype"),
    ("precision.reduce_order=tree train.accumulate=2", "reduce_order=tree|reduce_dtype"),
    ("train.steps=null", "train.steps=null|train.epochs=null"),
    ("train.epochs=1 train.steps=9", "train.steps=9|train.epochs=1.0"),
    ("train.accumulate=1000000", "data.batch_size"),
    ("precision=amp precision.param_dtype=fp16", "precision.param_dtype=fp16|fp32"),
    ("precision.master_dtype=bf16", "master_dtype=bf16: needs precision.param_dtype of fp16 or"),
    ("precision.overrides.fc=fp8", "precision.overrides.fc=fp8|fp32, fp16, bf16"),
    ("precision.overrides=fc", "precision.overrides"),
    ("precision.overrides.fc=[1]", "precision.overrides"),
    ("precision=fp16_master precision.overrides.zz*=fp32", "zz*"),
    ("model=dcgan precision=fp16_master precision.overrides.zz=fp32", "precision.overrides.zz"),
    # data that do not fit the model
    ("model=alexnet data=digits_32", "data.image_size=32|63"),
    ("model=alexnet_2012 data=digits_32", "data.image_size=32|63"),
    ("model=inception_v3 data=digits_64", "data.image_size=64|75"),
    ("model=googlenet model.width=0", "model.width=0|> 0"),
    ("model=googlenet model.aux_weight=-1", "model.aux_weight=-1|0"),
    ("model=inception_v2 model.aux_weight=0.3", "model.aux_weight"),
    ("model=resnet50 model.width=0.5", "model.width=0.5|preactivation"),
    ("model=alexnet model.width=0.5", "model.width=0.5|2012"),
    ("model=resnet50 model.variant=v2", "model.variant=v2|preactivation"),
    ("model=vgg16 model.num_classes=5", "model.num_classes=5|10"),
    ("model=vgg16 data=docs_words", "data.name=docs_text|images"),
    ("model=dcgan data=digits_64", "data.value_range=standardised|tanh"),
    ("model=dcgan data.image_size=48", "model.image_size=48|32, 64, 128"),
    ("model=resnet50 data.channels=1", "data.channels=1|3"),
    ("model=resnet50 model.num_classes=5", "model.num_classes=5|10"),
    # override grammar
    ("optim.lr=[1", "optim.lr=[1|must be a number > 0"),
    ("'optim.lr=${'", "optim.lr=|${...} is for configuration files"),
    ("'optim.lr=${nope}'", "optim.lr"),
    ("'optim.lr=${oc.env:HOME}'", "optim.lr"),
    ("optim.lr={", "optim.lr={|must be a number > 0"),
    ('"optim.lr=\'"', "optim.lr|must be a number > 0"),
    ("=3", "=3|key=value"),
    ("lstm_lm", "'lstm_lm'|key=value"),
    ("doctr", "'doctr'|did you mean 'doctor'"),
    ("-j 2 doctor", "'doctor': a verb comes first: mprun doctor"),
    ("''", "''|key=value"),
    ("'optim.lr=1\n'", "optim.lr=1|must be a number > 0"),
    ("'foo\nbar=1'", "foo|key=value"),
    ("'optim.lr=\0'", "optim.lr=|must be a number > 0"),
    ("seed=0,1", "seed=0,1|-m"),
    ("optim.lr=" + "9" * 5000, "optim.lr="),
    ("x" * 5000 + "=1", "xxx"),
    ("seed=" + "[" * 2000, "seed="),
    # paths and names
    ("data.root=/nonexistent", "data.root=/nonexistent|no such"),
    ("data.root=.", "data.root=.|null"),
    ("data=text data.root=kept", "data.root=kept: a file, must be a folder"),
    ("data.root=kept", "data.root=kept: a file, must be a folder"),
    ("data.root=" + "a" * 300, "data.root=aaa"),
    ("data.workers=2", "data.workers=2|0"),
    ("output_dir=.", "output_dir=.|exists"),
    ("output_dir=", "output_dir"),
    ("output_dir=/proc/none/here", "output_dir=/proc/none|cannot be created"),
    ("output_root=/proc/none", "output_root=/proc/none|cannot be created"),
    ("output_root=kept", "output_root"),
    ("name=a/b", "name='a/b'|letters"),
    ("name=..", "name='..'|letters"),
    ("name=", "name=''|letters"),
    ("name=" + "a" * 65, "name='aaa|64"),
    ("resume=/nonexistent", "resume=/nonexistent|no such"),
    ("resume=.", "resume=.|config.yaml"),
    ("resume=kept", "resume=kept: a file, must be a folder"),
    ("resume=", "resume="),
    ("++resume=nope", "resume=nope|no such"),
    ("resume=" + "a" * 3000, "resume=aaa"),
    # Hydra's own
    ("hydra.run.dir=/tmp/x", "hydra.run.dir|output_dir="),
    ("hydra.searchpath=[file:///tmp/x]", "hydra.searchpath: option files are |--config-dir DIR"),
    ("hydra.verbose=true", "hydra.verbose: mprun prints without Hydra's logs; use -v"),
    ("hydra/job_logging=none", "hydra/job_logging: mprun prints without"),
    ("hydra.mode=MULTIRUN", "hydra.mode: mprun sweeps by itself; use -m"),
    ("hydra/sweeper=basic", "hydra/sweeper: mprun sweeps by itself; use -m"),
    ("hydra.job.env_set.A=1", "hydra.job.env_set.A: mprun sets no variables"),
    ("hydra.job.chdir=true", "hydra.job.chdir: mprun stays in the folder"),
    # given twice
    ("model=resnet50 model=dcgan", "model=dcgan: model=resnet50 stands before it; give model once"),
    ("experiment=quickstart_underflow +experiment=quickstart_lost_updates", "give experiment once"),
    ("-m optim=sgd,adam optim=adamw", "optim=adamw: optim=sgd,adam stands before it"),
    # what is no text without quotes, and what no list or mapping holds
    ("data.options.x=[1,2", "data.options.x=[1,2: must be a number, |'data.options.x=\"[1,2\"'"),
    ("precision.overrides.fc=f(p", "precision.overrides.fc=f(p: must map module-name patterns"),
    ("precision.overrides.fc=glob(*)", "glob(*): choice(), range() and glob() stand for a whole"),
    ("optim.betas=[choice(1,2)]", "optim.betas=[choice(1,2)]: choice(), range() and glob()"),
    ("optim.betas.1=1 optim=adam", "optim.betas=1.0|< 1"),
    ("optim.betas.2=1 optim=adam", "optim.betas.2: unknown key"),
    ("name=jürgen", "name='jürgen'|must be 1 to 64 of letters"),
    ("hydra/launcher=joblib", "hydra/launcher"),
    ("+hydra.foo=1", "hydra.foo"),
    ("--config-dir=/nope", "--config-dir /nope|no such"),
    ("--config-dir kept", "--config-dir kept: a file, must be a folder"),
    ("--config-dir", "--config-dir|needs a value"),
    ("-j 2", "-j 2|-m"),
    ("-j 0 -m seed=0,1", "-j 0|from 1"),
    ("-j x -m seed=0,1", "-j x|from 1"),
    ("--verison", "--verison|did you mean '--version'"),
    ("--experimental-rerun x", "--experimental-rerun|unknown"),
    ("--resolve", "--resolve|--cfg"),
    ("--package model", "--package|--cfg"),
    ("--cfg", "--cfg|needs a value"),
    ("--cfg foo", "--cfg foo|job"),
    ("--cfg job optim.lr=0", "optim.lr=0.0|> 0"),
    ("--cfg job optim.lr", "'optim.lr'|key=value"),
    ("--cfg job -p model.nope", "--package model.nope"),
    ("--info foo", "--info foo|defaults"),
    ("--info defaults optim=zz", "optim=zz|adam"),
    ("-sc", "-sc|needs a value"),
    ("-sc install=tcsh", "install=tcsh|bash"),
    ("scaler-replay outputs/run --json", "scaler-replay: now a run for each rule: mprun -m "),
    ("numerics=on", "numerics=on: now numerics=probes"),
    ("numerics.enabled=true", "numerics.enabled: unknown key; now numerics.probes"),
    ("mismatch amp outputs/run", "mismatch: now mprun logprobs"),
    ("--help scaler-replay", "no key, group or verb has this name; now a run for each rule"),
    ("train.fused_norm=on", "train.fused_norm: unknown key; now train.compile=default"),
    ("doctor --foo", "--foo|--json"),
    ("doctor --json device=cuda", "device=cuda|--json"),
    # sweeps: one bad cell and nothing starts
    ("-m precision=fp32,fp61", "precision=fp61|fp32"),
    ("-m optim.lr=0.1,-1", "optim.lr=-1.0|> 0"),
    ("-m seed=0,0", "-m|the same"),
    ("-m output_dir=x seed=0,1", "output_dir"),
    ("-m 'seed=range(0,0)'", "seed=range(0,0)|at least one value"),
    ("-m 'seed=range(0,3,0)'", "seed=range(0,3,0)|a step other than 0"),
    ("-m 'optim.lr=range(0.1,1,0)'", "optim.lr=range(0.1,1,0)|a step other than 0"),
    ("-m 'optim.lr=range(0,1e999)'", "optim.lr=range(0,1e999)|finite"),
    # As many values are never made, not one of them.
    ("-m 'seed=range(0,30000000)'", "30,000,000 values, one run each|at most 10,000"),
    ("-m 'seed=shuffle(range(9e15,0,-1))'", "9,000,000,000,000,000 values|at most 10,000"),
    ("-m 'optim.lr=range(0,1,1e-12)'", "1,000,000,000,001 values|at most 10,000"),
    ("-m 'precision=glob(zz*)'", "precision=glob(zz*)|at least one value"),
    ("-m 'optim.lr=interval(0,1)'", "optim.lr=interval(0,1)|choice"),
    ("-m optim.lr=[", "optim.lr=[|must be a number > 0"),
]
CASES = with_extensions("BAD_LINES", CASES)


def tree(folder) -> list[tuple[str, int, int]]:
    found = []
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.stat(os.path.join(path, name))
            found.append((os.path.join(path, name), status.st_mtime_ns, status.st_size))
    return sorted(found)


@pytest.mark.parametrize(("command", "wanted"), CASES, ids=[c[:50] for c, _ in CASES])
@pytest.mark.few(24)
def test_bad_input_is_one_line_and_writes_nothing(command, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("as it was")
    before = tree(tmp_path)
    line = refused(capsys, *shlex.split(command), says=wanted.split("|"))
    assert len(line) <= 201 and line.startswith("mprun: ") and line.endswith("\n")
    assert tree(tmp_path) == before


MODE, CHOOSES = "own/precision/mine.yaml: precision.", "# @package _global_\ndefaults:\n- override"
NAMELESS = "does not name what to build; its defaults need /schema/"
# What is in GROUP/mine.yaml of a --config-dir, and what the line says behind the file's name.
OPTION_FILES = [
    ("precision", "a: [1\n", "line 2: expected ',' or ']', but got"),
    ("precision", "a: *x\n", "line 1: found undefined alias"),
    ("precision", "a:\n\t- 1\n", "line 2: found character '\\t' that cannot start any token"),
    ("precision", "norm_dtype: fp32\nnorm_dtype: fp16\n", "line 2: found duplicate key norm_dtype"),
    ("precision", "a: !!python/object:x {}\n", "line 1: could not determine a constructor"),
    ("precision", "a: 1\n---\nb: 2\n", "line 2: but found another document"),
    ("precision", "a: \0\n", "unacceptable character #x0000"),
    ("precision", b"a: \xff\n", "'utf-8' codec can't decode byte 0xff"),
    ("precision", "- 1\n", "must be a mapping from keys (text) to values"),
    ("precision", "3\n", "must be a mapping from keys (text) to values"),
    ("precision", "defaults: {a: 1}\n", "defaults: must be a list of OPTION and GROUP: OPTION"),
    ("precision", "null: 1\n", "must be a mapping from keys (text) to values"),
    ("precision", "norm_dtyp: fp32\n", f"{MODE}norm_dtyp: unknown key; did you mean 'norm_dtype'?"),
    (
        "precision",
        "products:\n  input: e4m3\n",
        f"{MODE}products: unknown key; now precision.matmul",
    ),
    ("precision", "overrides: [1]\n", f"{MODE}overrides: "),
    ("optim", "name: sgd\nlr: abc\n", "optim.lr: must be a number > 0 (learning rate"),
    ("train", "foo: 1\n", "train.foo: unknown key"),
    (
        "experiment",
        f"{CHOOSES} /modl: gpt\n",
        "override modl: no such group; did you mean 'model'?",
    ),
    ("experiment", f"{CHOOSES} /model: gptt\n", "model: gptt: did you mean 'gpt'?"),
    ("experiment", "# @package _global_\ntrain: 3\n", "train: must be a mapping (length, "),
    ("optim", "defaults: [sdg]\n", "optim: sdg: did you mean 'sgd'?"),
    ("experiment", "seed: 1\n", "begin the file with '# @package _global_'"),
    ("model", "name: gpt\n", f"{NAMELESS}model/NAME@_here_"),
    ("data", "batch_size: 1\n", f"{NAMELESS}data/NAME"),
    ("data", "foo: 1\n", f"{NAMELESS}data/NAME@_here_"),
]


COMMANDS = ([], ["--cfg", "job"], ["-m", "seed=0,1"])  # in turn: a composition takes its time


@pytest.mark.few(2)
@pytest.mark.parametrize(("group", "content", "says"), OPTION_FILES)
def test_a_bad_option_file_is_named(group, content, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own" / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    more = COMMANDS[OPTION_FILES.index((group, content, says)) % 3]
    line = refused(capsys, "--config-dir", "own", f"{group}=mine", *more)
    assert says in line and "own" in line and f"{group}/mine.yaml: " in line, line
    assert os.listdir(tmp_path) == ["own"]


def test_a_broken_option_file_that_another_one_chooses_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment = "defaults: [override /model: mine]"
    for group, content in (("model", "defaults: [gpt]\nlayers: ["), ("experiment", experiment)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    says = "/model/mine.yaml: line 4: expected the node content"
    refused(capsys, "--config-dir", ".", "experiment=mine", says=says)


def test_an_option_file_whose_defaults_lead_back_to_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text("defaults: [mine]\n")
    says = "precision=mine: the defaults of an option's file lead back to it"
    refused(capsys, "--config-dir", ".", "precision=mine", says=says)


def test_long_lines_keep_what_matters():
    options = ", ".join(f"option_{number}" for number in range(50))
    line = _one_line(f"mprun: key=opt: did you mean 'option_7'? It must be one of {options}")
    assert "did you mean 'option_7'?" in line and len(line) <= 200
    assert line.endswith(" ... (mprun --help)") and ", option_" in line and ",  ..." not in line
    line = _one_line(f"mprun: {'word ' * 50}so that the end says what to do")
    assert line.endswith(" so that the end says what to do") and len(line) <= 200
    line = _one_line(f"mprun: resume=/tmp/{'deep/' * 100}end: no such folder")
    assert line.startswith("mprun: resume=/tmp/deep/") and len(line) <= 200
    assert line.endswith("deep/end: no such folder")
    line = _one_line(f"mprun: key=x: stays (allowed: {options})")
    assert line.endswith(" ...; mprun --help)") and len(line) <= 200


WORDS = ("7", "skipped", "12,345.6789", "/data/a/path/of/a/run-s0,", "normal;", "(2^16)", "w" * 70)


@pytest.mark.parametrize("seed", range(50))
def test_a_long_line_is_cut_between_words(seed):
    draw = random.Random(seed)
    given = ["mprun:", "outputs/run:", *draw.choices(WORDS, k=60)]
    known = {word.rstrip(",;:") for word in given}
    for longest in (200, 600):
        line = _one_line(" ".join(given), longest)
        assert len(line) <= longest
        left = [word for word in line.split(" ") if word != "..."]
        assert {word.rstrip(",;:") for word in left} <= known
        assert left[:2] == given[:2] and left[-1] == given[-1]
    for most in (80, 120):
        cut = shortened(" ".join(given), most)
        assert len(cut) <= most and cut.endswith(" ...")
        assert {word.rstrip(",;:") for word in cut.split(" ")[:-1]} <= known


def test_a_path_loses_its_middle_before_the_message_loses_a_word():
    path = f"/home/user/{'deeper/' * 20}run.json"
    why = "must be one of loss, top1, top5"
    assert _one_line(f"mprun: {path}: {why}") == f"mprun: {path}: {why}"
    why += ", macro_f1_percent, sliced_wasserstein, perplexity and what else is there, 123"
    for line in (_one_line(f"mprun: {path}: {why}"), _one_line(f"mprun: {why} in {path}")):
        assert why in line and len(line) == 200
        assert " /home/user/deeper/" in line and "..." in line and "deeper/run.json" in line
    why = "this is why it cannot be read " * 5 + "and what to do"
    line = _one_line(f"mprun: {path}: {why}")
    assert len(line) <= 200 and line.endswith(" and what to do") and "deeper/run.json: this" in line
    assert shortened("one word", 8) == "one word"
    assert shortened("x" * 90 + " y", 60).count("x") == 57


@pytest.mark.parametrize("word", ["run", "train"])
def test_a_word_for_a_plain_run_is_left_out(word, capsys):
    assert main([word, "optim.lr=0"]) == 2
    note, line = capsys.readouterr().err.splitlines()
    assert note == f"mprun: '{word}' may be left out" and line.startswith("mprun: optim.lr=0.0")


def test_device_cuda_without_a_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    refused(capsys, "device=cuda", says="device=cuda")
    assert tree(tmp_path) == []


def test_more_memory_than_there_is_ends_in_one_line_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # 4 x 10^9 x 10^9 weights: more bytes than a 64-bit machine can address.
    refused(capsys, "model.hidden_size=1000000000", "device=cpu", says="out of memory", code=5)
    assert tree(tmp_path) == []


def test_a_long_line_is_not_cut_in_a_parenthesis():
    modes = ", ".join(f"fp16_master+blocks.{number}=fp32" for number in range(5))
    why = f"not compared, no FP32 runs ({'x' * 30}) given"
    line = _one_line(f"mprun: gpt: {modes} (5 runs, e.g. g/a): {why}")
    assert line.count("(") == line.count(")") == 1 and "... not compared, no FP32" in line
    line = _one_line(f"mprun: gpt ({'a long list ' * 30}): not compared, {'words ' * 9}after it")
    assert line.count("(") == line.count(")") and line.startswith("mprun: gpt ...")
