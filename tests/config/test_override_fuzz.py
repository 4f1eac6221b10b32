"""Whatever is typed composes or is bad input in one line; nothing else is ever raised."""

import random
import re

import pytest

from mprun.config.compose import compose_config
from mprun.errors import BadInput

KEYS = """
model precision scaler optim data train seed optim.lr train.steps train.clip_norm scaler.scale
scaler.init_scale scaler.growth_factor data.batch_size precision.overrides precision.overrides.fc
optim.betas name precision.overrides.* hydra.run.dir hydra/launcher model.foo foo foo.bar _target_
model._target_ . a. .a model@x schema/model defaults optim.milestones resume output_dir compare
numerics numerics.every numerics.modules device
""".split()
KEYS += ["", "é"]
VALUES = """
resnet50 lstm_lm amp fp16_naive dynamic adam null true 1 0 -1 1e-3 1e999 nan -inf 1.5 [1,2] [] {}
{a:1} {a:{b:[c]}} a,b range(0,3) choice(1,2) glob(*) interval(0,1) sort(3,1) shuffle(1,2) ${seed}
${oc.env:HOME} ${oc.env:NO_SUCH_VARIABLE} ${nope:1} ${ $ ${.lr} a=b [ } cast( int(x) str([1])
float(nope) extend_list(1) _target_ ../../etc !!python/object:os.system 0x10 1_000 ${optim}
${model.name}
""".split()
VALUES += ["", "'x y'", '"x', "\\", "😀", "\u202e", "\x00", "\n", "9" * 5000, "x" * 400]
GOOD = """
optim.lr=0.1 seed=3 precision=amp model=dcgan train.steps=7 name=x precision.overrides.fc*=fp32
optim=adam scaler=dynamic threads=1
""".split()
KEYS += ["data.root", "data.options.x", "model.options.a.b", "optim.betas.1", "hydra.searchpath"]
VALUES += ["it's", "a&b;c", "f(x", "a b)"]
VALUES += "[[1] [a:b] {a:b,a:c} [choice(1,2)] ??? -x".split()
# What libraries say, in their words or in those of Python.
FOREIGN = re.compile(
    r"[Hh]ydra(?!['./ ]|:)|hydra\.cc|OmegaConf|zip\(|Lexer|mismatched|viable|extraneous|DictConfig"
    r"|ListConfig|AnyNode|could not be converted|[Ii]nterpolation|not in '|Error|object at|\(\^\)"
)
PREFIXES = ["", "", "", "", "+", "++", "~"]


@pytest.mark.slow
def test_random_command_lines():
    seed, count = 1710_03740, 1000
    draw = random.Random(seed)
    outcomes = {"composed": 0, "refused": 0}
    for number in range(count):
        parts = (PREFIXES, KEYS, ["=", "=", "=", "=", "", "=="], VALUES)
        several = range(draw.choice([0, 1, 1, 1, 2, 3]))
        overrides = ["".join(draw.choice(one) for one in parts) for _ in several]
        overrides += draw.sample(GOOD, draw.choice([0, 1, 2]))
        try:
            compose_config(overrides)
            outcomes["composed"] += 1
        except BadInput as error:
            assert str(error) and "\n" not in str(error).rstrip("\n"), overrides
            assert not FOREIGN.search(str(error)), (overrides, str(error))
            outcomes["refused"] += 1
        except Exception as error:
            message = f"seed {seed}, number {number}: {overrides} raised {error!r}"
            raise AssertionError(message) from error
    # Both ends are reached: a fuzz that is refused throughout tests the parser only.
    assert min(outcomes.values()) >= count / 10, outcomes
