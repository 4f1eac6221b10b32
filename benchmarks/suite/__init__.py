"""The benchmark behind this project's claims: a suite of models, other tools beside, targets.

    python -m benchmarks.suite [--peers all] [--only "ResNet-50 b256"]
    python -m benchmarks.suite model=resnet50 --peers loop,amp

from the root of the repository. Sessions, windows, energy and tables are those of `mprun bench`
(an extension), which measures a user's model in mprun's modes. This package has the other
contenders (peers/), the check that all of them compute the same, and the targets for an H200.
"""
