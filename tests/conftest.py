"""Which tests run, and how a test builds a run from the overrides a user would type.

Imports torch where it is needed: the process that hands out the tests needs none.
"""

import gc
import os
import signal
import zlib
from collections import defaultdict

import pytest

from .real_data import unpacked

pytest.register_assert_rewrite("tests.helpers")

HANDLERS = pytest.StashKey[dict]()


def pytest_addoption(parser):
    part = "of N parts of the tests only the K-th; a test stays in its own when others come or go"
    parser.addoption("--slice", type=_slice, metavar="K/N", help=part)
    threads = "threads of torch in each process of the tests (default: 1)"
    parser.addoption("--threads", type=int, default=1, metavar="N", help=threads)


def _slice(text):
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError(text)
    return k, n


def pytest_configure(config):
    # Commands that a test starts have as many threads as the tests.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.option.threads))
    # A shell's background job ignores SIGINT, and so would the commands that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = {number for number in signal.Signals if signal.getsignal(number) is not None}
    config.stash[HANDLERS] = {number: signal.getsignal(number) for number in numbers}


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item):
    import torch

    # A run that has ended leaves signals ignored where no command is around it.
    for number, handler in item.config.stash[HANDLERS].items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    # Threads that outnumber the free cores wait for each other: seconds become minutes. Before each
    # test, since `threads=` of a run in this process stays.
    torch.set_num_threads(item.config.option.threads)
    # Whatever ran before. torch.manual_seed writes the stack down for each device that is absent.
    seeded = torch if torch.cuda.is_available() else torch.default_generator
    seeded.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    import torch

    _mark_the_rest_slow(items)
    long = [item for item in items if item.get_closest_marker("long")]
    for item in long:
        item.add_marker(pytest.mark.slow)
    items[:] = [item for item in items if item not in long] + long
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    impossible = [] if torch.cuda.is_available() else on_gpu
    for item in impossible:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    left_out = set()
    if not config.option.markexpr:  # a test that is skipped costs 8 ms
        left_out.update(impossible, (i for i in items if i.get_closest_marker("slow")))
    if config.option.slice:
        k, n = config.option.slice
        left_out.update(i for i in items if zlib.crc32(i.nodeid.encode()) % n != k % n)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported: looking through it costs a fifth of a second each time


def pytest_sessionfinish():
    gc.unfreeze()  # else libraries tell of what is left at the end of the process


def _mark_the_rest_slow(items):
    """``@pytest.mark.few(n)``: n of its cases, evenly spread, are in the default run.

    ``@pytest.mark.few``: as many as show each value of each parameter.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.function].append(item)
    for own in cases.values():
        number = own[0].get_closest_marker("few").args
        for item in {*own} - ({*_spread(own, *number)} if number else {*_each_value(own)}):
            item.add_marker(pytest.mark.slow)


def _spread(cases, number):
    last = len(cases) - 1
    return [cases[round(place * last / max(1, number - 1))] for place in range(number)]


def _each_value(cases):
    """Yield the case with most values that no other one had, until there is none."""
    values = {case: {*enumerate(case.callspec._idlist)} for case in cases}
    left = set().union(*values.values())
    while left:
        case = max(cases, key=lambda one: len(values[one] & left))
        left -= values[case]
        yield case


@pytest.fixture(scope="session", autouse=True)
def _composed_once():
    from .composed_once import keeping

    with pytest.MonkeyPatch.context() as patch:
        keeping(patch)
        yield


@pytest.fixture
def build_run():
    """``build_run("model=resnet50", ..., device="cpu")``: a `Built`, pinned and seeded as in a run.

    Afterwards the random state is that of ``torch.manual_seed(0)`` and the construction of the
    model, which is what a hand-written loop starts from.
    """

    import torch

    from mprun.assembly import build
    from mprun.config.compose import compose_config
    from mprun.precision import pin_math_flags

    def make(*overrides, device="cpu"):
        config = compose_config([*overrides, f"device={device}"]).config
        pin_math_flags(config.precision.fp32_math)
        torch.manual_seed(config.seed)
        return build(config, torch.device(device))

    yield make
    # Flags are process-wide: no test may hand its own to the next one.
    pin_math_flags("ieee")


@pytest.fixture(scope="session")
def wikitext_2(tmp_path_factory):
    """Folder of WikiText-2: wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens."""
    return unpacked("wikitext-2", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def cifar10_jpeg(tmp_path_factory):
    """Folder of CIFAR-10 as 60,000 JPEG files: {train,test}/<class>/NNNN.jpg. Takes 10 s."""
    return unpacked("cifar10-jpeg", tmp_path_factory.getbasetemp())
