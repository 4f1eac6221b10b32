"""mprun: what lower precision does to a training run, compared with FP32.

In your own script:

    model, optimizer = mprun.prepare(model, optimizer, precision="amp")
    with mprun.Run("outputs/mine", optimizer, config=vars(args), seed=0) as run: ...
    mprun.switch(model, "bf16_master")           # another mode, between two steps
    mprun.sweep(train, modes=["fp32", "amp"], seeds=3)      # train(run) in each, and a comparison
    mprun.probe(step, optimizer)                 # exponents of every tensor of a step
    mprun.explain(step, optimizer)               # the operation that makes the first NaN
    mprun.advise(step, optimizer)                # what 16 bits need: scale, layers in FP32

With recorded runs:

    mprun.load("outputs/lstm_lm-docs_words")     # configuration, metrics and probes of runs
    mprun.compare("outputs/lstm_lm-docs_words")  # a verdict per precision mode, as the command

In a task of one's own, for `mprun model.task=...`:

    metrics = (mprun.Metric("f1", higher_is_better=True, unit="fraction"),)

Each is imported on first use; the last three import no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mprun.comparison import compare as compare
    from mprun.comparison.notebook import load as load
    from mprun.extensions.diagnosis.of_script import advise as advise
    from mprun.extensions.diagnosis.of_script import explain as explain
    from mprun.prepared import prepare as prepare
    from mprun.prepared import state_of as state_of
    from mprun.prepared import switch as switch
    from mprun.record.metric_facts import Metric as Metric
    from mprun.script.run import Diverged as Diverged
    from mprun.script.run import Run as Run
    from mprun.script.sweep import sweep as sweep
    from mprun.script.watched import probe as probe

# Name -> its module.
_PUBLIC = {
    "prepare": "mprun.prepared",
    "state_of": "mprun.prepared",
    "switch": "mprun.prepared",
    "Run": "mprun.script.run",
    "Diverged": "mprun.script.run",
    "probe": "mprun.script.watched",
    "advise": "mprun.extensions.diagnosis.of_script",
    "explain": "mprun.extensions.diagnosis.of_script",
    "load": "mprun.comparison.notebook",
    "compare": "mprun.comparison",
    "Metric": "mprun.record.metric_facts",
    "sweep": "mprun.script.sweep",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name):
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from mprun.entry_points import required

        required(f"mprun.{name}", _PUBLIC[name])
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
