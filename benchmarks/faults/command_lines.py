"""Bad command lines: 2,000 random ones, 200 that people typed.

A case holds if it runs, or if it is refused in one line with exit code 2 (5 if the machine is too
small), at once and with nothing written.
"""

import random
import re
import resource
import shutil
from pathlib import Path

from benchmarks.faults.harness import Answer, Campaign, last_line, limit, mprun
from benchmarks.faults.subjects import TINY, subject

GENERATED = 2000
KEYS = """
model precision scaler optim data train numerics experiment seed device threads name output_dir
output_root resume cpu_half deterministic compare optim.lr optim.eps optim.momentum optim.betas
optim.schedule optim.milestones optim.warmup_updates optim.average_decay train.steps train.epochs
train.log_every train.eval_every train.checkpoint_every train.keep_checkpoints train.clip_norm
train.accumulate train.compile train.cuda_graph train.channels_last train.eval_arithmetic
scaler.kind scaler.scale scaler.init_scale scaler.growth_factor scaler.growth_interval
scaler.min_scale scaler.max_scale scaler.per data.batch_size data.sequence_length data.vocab_size
data.root data.workers data.train_tokens data.factory model.factory model.task model.hidden_size
model.num_layers model.dropout model.projection_size model.sampled_softmax model.vocab_size
precision.name precision.param_dtype precision.master_dtype precision.overrides
precision.overrides.fc precision.overrides.* precision.autocast_dtype compare.metric
compare.margin compare.window numerics.every numerics.modules numerics.shadow_every hydra.run.dir
hydra/launcher hydra.launcher.n_jobs hydra.mode _target_ model._target_ foo foo.bar a. .a model@x
schema/model defaults é 模型 optim.lr.x +new.key ~optim ~train.steps ++seed
""".split()
VALUES = (
    """
resnet50 lstm_lm dcgan amp fp32 fp16_naive fp16_master_scaled tf32 dynamic static none torch adam
sgd null true false on off auto 0 1 -1 2 7 1e-3 1e3 1e999 1e-320 nan -inf inf 1.5 0x10 1_000 [1,2]
[] {} {a:1} {a:{b:[c]}} a,b 1,2 range(0,3) choice(1,2) interval(0,1) glob(*) sort(3,1) shuffle(a,b)
${seed} ${foo} ${oc.env:HOME} ${oc.env:NOT_SET} ${now:%s} ${model.name} ?? ??? !!python/object:x
/dev/null /nonexistent/path . .. ~ os:system json:loads mprun.models:build math:pi nomodule:x x:y:z
'quoted' "quoted" 'half "half \\n %s {} é 模型 🙂 a=b a==b = , : * ? [ ] ( ) # ; & | ` $
99999999999999999999 -99999999999999999999 fp8 fp16 bf16 float16 gpu cuda cpu mps cuda:7
16-mixed bf16-mixed O1 O2
""".split()
    + ["", " ", "a b", "\t", "\n", "x" * 5000, "\x00"]
)
FLAGS = [
    ["--cfg", "job"],
    ["--info", "defaults"],
    ["--cfg", "hydra"],
    ["--resolve"],
    ["-p", "optim"],
]
FLAGS += [["--cfg"], ["-j", "2"], ["-j", "x"], ["--stall-after", "-1"], ["-cd", "/nonexistent"]]
FLAGS += [["--version"], ["-sc", "install=bash"], ["-sc", "x"], ["--unknown"], ["-x"], ["--"]]
VERBS = ["compare", "advise", "explain", "bench", "doctor"]


def generated(campaign: Campaign) -> None:
    """Run random keys, values and options behind a run of one step."""
    chance = random.Random(6)
    home = campaign.scratch("generated")
    for number in range(GENERATED):
        if number % 200 == 0:
            print(f"generated: {number} of {GENERATED}", flush=True)
        line = [
            f"{chance.choice(KEYS)}={chance.choice(VALUES)}" for _ in range(chance.randint(1, 3))
        ]
        if chance.random() < 0.2:
            line += chance.choice(FLAGS)
        run = chance.random() < 0.3
        base = [*TINY, "train.steps=1"] if run else []
        line = [*base, *line] if run else [*line, "--cfg", "job"]
        answer = mprun(line, home, prepare=limit(resource.RLIMIT_AS, 8 * 2**30), seconds=120)
        _judge(campaign, "generated command lines", line, answer, home)


def by_hand(campaign: Campaign) -> None:
    """Run lines that a person might type: slips, other tools' words, verbs with wrong arguments."""
    run = str(subject(campaign).stopped)
    home = campaign.scratch("by_hand")
    for text in BY_HAND.strip().splitlines():
        line = [re.sub(r"\bRUN\b", run, word) for word in text.split()]
        answer = mprun(line, home, prepare=limit(resource.RLIMIT_AS, 8 * 2**30), seconds=120)
        _judge(campaign, "command lines by hand", line, answer, home)


def _judge(campaign: Campaign, test: str, line: list[str], answer: Answer, home: Path) -> None:
    told = [text for text in answer.output.splitlines() if text.startswith("mprun: ")]
    made = [path for path in home.iterdir() if path.name != ".output"]
    if answer.code is None:
        kind = "no answer"
    elif "Traceback (most recent call last)" in answer.output or answer.code in (1, 70):
        kind = "traceback"
    elif answer.code in (0, 3):
        kind = "harmless"
    elif answer.code in (2, 4, 5):
        kind = "found" if told else "no line"
        if answer.code == 2 and made:
            kind = f"wrote {made[0].name}"
        if answer.code == 2 and len(told) != len(answer.output.splitlines()):
            kind = "more than a line"
    else:
        kind = f"exit code {answer.code}"
    campaign.note(test, " ".join(line)[-200:], kind, last_line(answer))
    for path in made:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


_SMALL = "model=lstm_lm data=synthetic_tokens data.vocab_size=16 train.steps=1 device=cpu threads=1"
BY_HAND = f"""
run
train
mprun
mprun train
train model=resnet50
run model=resnet50
--helpp
-h extra
--version extra
help
compare
compare --help
compare RUN
compare RUN RUN
compare nothere
compare RUN nothere
compare RUN --margin x
compare RUN --margin -1
compare RUN --margin 1e999
compare RUN --metric nothere
compare RUN --out /proc/nothere
compare RUN --json --out x
compare RUN --looks 3,x
compare RUN --looks 7,3
compare RUN --check
compare RUN --unknown
compare --tag loss RUN RUN
compare --tag loss a=RUN
compare --tag nothere fp32=RUN amp=RUN
compare . .
compare /
compare /dev/null
compare RUN/metrics.jsonl
compare RUN/run.json
explain
explain --help
explain RUN
explain nothere
explain RUN RUN
explain RUN/run.json
explain RUN --json
explain RUN --unknown
explain /
advise --help
advise RUN
advise nothere
advise model=nothere
advise --steps x
advise precision=amp model=nothere
bench --help
bench --budget x
bench --budget -1
bench --modes nothere
bench model=nothere
bench --unknown
bench modes=fp32
bench --roofline --unknown
doctor --help
doctor --json
doctor extra
doctor --unknown
resume
resume=
resume=RUN
resume=nothere
resume=RUN optim.lr=1
resume=RUN train.steps=1
resume=RUN train.steps=x
resume=RUN precision=amp
resume=RUN seed=1
resume=RUN -m
resume=RUN,RUN
resume=RUN/checkpoints
resume=RUN/run.json
resume=/
resume=RUN train.log_every=0
resume=RUN train.keep_checkpoints=0
precision=fp16
precision=16-mixed
precision=bf16-mixed
precision=O1
precision=O2
precision=bf16
precision=half
precision=float16
precision=fp8
precision=amp,fp32
precision
precision=
=amp
precision=amp precision=fp32
Precision=amp
--precision=amp
--precision amp
-precision amp
device=gpu
device=cuda
device=cuda:0
device=mps
device=
model=resnet
model=ResNet50
model=resnet50,alexnet
model=gpt
model=bert
model
data=imagenet
data=cifar
data=digits
data=docs_text
data=mnist
data=cifar10
data=cifar10 data.root=nothere
data=text data.root=nothere
data=image_folder data.root=/
data=image_folder
data=custom
data=custom data.factory=nothere
data=custom data.factory=nothere:x
data=custom data.factory=os:system
data=custom data.factory=math:pi
model=custom
model=custom model.factory=os:getcwd model.task=classification
model=custom model.factory=nothere:x model.task=classification
model=custom model.factory=math:pi model.task=nothere
optim=sdg
optim=adam optim.betas=[0.9]
optim=adam optim.betas=[0.9,1.1]
optim=adam optim.momentum=0.9
optim.lr=0
optim.lr=-1
optim.lr=nan
optim.lr=inf
optim.lr=abc
optim.lr=1e-400
optim.lr=100000 precision=fp16_naive {_SMALL}
optim.lr=1e30 precision=fp16_naive {_SMALL}
optim.lr=1e300 {_SMALL}
optim.schedule=cos
optim.schedule=step optim.milestones=[]
optim.schedule=step optim.milestones=[5,3]
optim.milestones=[x]
lr=0.1
learning_rate=0.1
batch_size=32
epochs=3
steps=10
seed=abc
seed=-1
seed=1.5
seed=99999999999999999999
train.steps=0
train.steps=-5
train.steps=1e3
train.steps=1.5
train.steps=ten
train.steps=99999999999
train.epochs=0
train.epochs=-1
train.epochs=1 train.steps=1
train.log_every=0
train.log_every=-1
train.accumulate=0
train.accumulate=x
train.clip_norm=-1
train.clip_norm=0
train.compile=yes
train.cuda_graph=on device=cpu
train.keep_checkpoints=0
train.checkpoint_every=-1
train.eval_arithmetic=half
scaler=grad
scaler=static
scaler=static scaler.scale=0
scaler=static scaler.scale=-8
scaler=static scaler.scale=1e39
scaler.scale=128
scaler.scale=128 precision=fp16_master_scaled
scaler=dynamic scaler.growth_factor=1
scaler=dynamic scaler.backoff_factor=2
scaler=dynamic scaler.min_scale=10 scaler.max_scale=1
scaler=dynamic scaler.growth_interval=0
scaler.kind=dynamic
precision.overrides.nothere=fp32
precision.overrides.*=fp32
precision.overrides=fp32
precision.overrides.fc=fp8
precision.param_dtype=fp16
precision.param_dtype=fp8
precision.master_dtype=fp16
compare.margin=-1
compare.margin=x
compare.metric=accuracy
compare.window=0
numerics=on numerics.every=0
numerics=on numerics.modules=[nothere]
numerics=yes
numerics.shadow_every=-1
threads=0
threads=-1
threads=100000
output_dir=/
output_dir=/proc/x
output_dir=/dev/null
output_dir=RUN
output_root=/proc
output_root=/dev/null/x
name=/
name=..
name=../../x
-m
-m precision=
-m precision=nothere,fp32
-m seed=range(0,20000)
-m seed=range(0,0)
-m -j 0
-m -j x seed=0,1
-m -j 2 optim.lr=interval(0,1)
-m resume=RUN,RUN
-m hydra/launcher=nothere seed=0,1
-m optim.lr=0.1,x {_SMALL}
-j 2
--stall-after 5
--cfg
--cfg all extra
--cfg nothere
--info
--info nothere
-p optim
--resolve
-cd nothere
-cd /etc precision=amp
--config-dir
--multirun
-sc install=tcsh
-sc
experiment=nothere
experiment=resnet50_imagenet
experiment=dcgan_celeba data.root=.
experiment=quickstart_underflow,quickstart_lost_updates
+foo=1
++optim.lr=0.1,0.2
~optim
~optim.lr
optim.lr=0.1 optim.lr=0.2
hydra.run.dir=/tmp/x
hydra.mode=MULTIRUN
hydra/launcher=joblib
model.hidden_size=99999999 device=cpu
model.hidden_size=0
model.num_layers=0
model.num_layers=100000
model.dropout=1
model.dropout=-0.1
model.projection_size=200
data.batch_size=0
data.batch_size=99999999
data.sequence_length=0
data.workers=-1
data.workers=100000
data.vocab_limit=0
data.vocab_limit=1
é=1
a.b.c.d.e=1
[a]=1
{{a:1}}
model={{a:1}}
model=[lstm_lm]
model=null
data=null
optim=null
precision=null
scaler=null
"""
