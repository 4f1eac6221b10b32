"""`python -m benchmarks.suite`: `mprun bench` with the suite and other tools; the same options."""

import sys
import time
from argparse import Namespace

from benchmarks.suite.contenders import PEERS
from mprun.cli.arguments import names
from mprun.errors import DONE, INTERRUPTED, BadInput, MprunError
from mprun.extensions.bench import command as bench

_WHAT = """\
mprun's precision modes beside other tools.

benchmarks.suite                  : the suite: ResNet-50, AlexNet, DCGAN, LSTM language models on a
                                    GPU, small sizes of them on a CPU
benchmarks.suite model=... [key=value] : one configuration
benchmarks.suite --host ...       : the host side of a CUDA step on a fake device, without a GPU

Only contenders that compute the same as the others are timed."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code of `mprun bench`."""
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.host:
            from benchmarks.suite.contest import Suite
            from tests.fake_cuda.host_side import host

            return host(Suite(), options, ["-m", "benchmarks.suite", *arguments])
        if options.compile_ahead:
            from benchmarks.suite.compile_ahead import compile_ahead

            return compile_ahead(options, started)
        return bench.bench("benchmarks.suite.contest:Suite", options, started)
    except MprunError as error:
        print(f"benchmarks.suite: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as ended:  # argparse, after a help page
        return int(ended.code or DONE)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse(arguments: list[str]) -> Namespace:
    """Return the options of the command line; BadInput names what is wrong with one."""
    found = bench.bench_parser(_WHAT)
    found.prog = "python -m benchmarks.suite"
    found.add_argument(
        "--peers",
        nargs="?",
        const="all",
        type=names("--peers"),
        metavar="A,B",
        help=f"other tools beside mprun: all, or names of {', '.join(PEERS)} (the suite takes all "
        "of them in 16-bit modes, the loop alone in FP32, TF32)",
    )
    found.add_argument(
        "--only",
        type=names("--only"),
        metavar="A,B",
        help='of the suite the models whose names begin so: "ResNet-50 b256,DCGAN"',
    )
    found.add_argument(
        "--ratios",
        action="store_true",
        help="the suite's networks in few modes, beside torch.amp, plain and compiled",
    )
    found.add_argument(
        "--compile-ahead",
        action="store_true",
        help="only compile what would be measured, several at once, into the compiler's cache",
    )
    found.add_argument(
        "--host", action="store_true", help="the host side of a CUDA step, without a GPU"
    )
    options = bench.parse(arguments, found)
    if options.ratios and options.peers is None:
        options.peers = ["amp", "amp+"]
    if options.host and options.end_to_end:
        raise BadInput("--end-to-end: not with --host, which only measures the step")
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
