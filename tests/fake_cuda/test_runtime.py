"""The fake runtime itself: it notices what the other tests say is not there."""

import pytest

from .cells import MODELS
from .conftest import ROOT
from .runtime import Counts, is_fake

CAPTURE = """
x, w = torch.zeros(2, 8, device="cuda")
side = torch.cuda.Stream()
other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
"""


def test_not_in_this_process():
    assert not is_fake()


def test_what_it_is(script):
    found = script(
        "p = torch.cuda.get_device_properties(0)\n"
        "return {'name': p.name, 'count': torch.cuda.device_count(), 'of': [p.major, p.minor]}"
    )
    assert "fake" in found["name"] and found["count"] == 1 and found["of"] == [9, 0]


WAITS = ("x.sum().item()", "x.cpu()", "x.nonzero()", "bool(x.any())", "torch.cuda.synchronize()")


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.few(2)
def test_a_wait_is_an_error_and_counted(asked, wait):
    x = 'x = torch.zeros(8, device="cuda")'
    found = asked(f'{x}\ntorch.cuda.set_sync_debug_mode("error")\n{wait}')
    assert "called a synchronizing CUDA operation" in found["error"]
    free = asked(f"{x}\n{wait}")
    assert free["counts"]["waits"] > 0
    # No kernel runs: how many values are not zero is whatever lay in memory, at times too many.
    assert "error" not in free or "numel" in free["error"]


@pytest.mark.slow
def test_a_wait_planted_in_a_run_is_found(asked, tmp_path):
    found = asked(f"""
from unittest import mock
from mprun.tasks import Reconstruction
own = Reconstruction.compute
def compute(self, *arguments):
    metrics = own(self, *arguments)
    float(metrics["loss"])
    return metrics
with mock.patch.object(Reconstruction, "compute", compute):
    from worker import run
    return run({str(tmp_path / "run")!r}, {MODELS["conv_autoencoder"]!r} + ["train.steps=4"])
""")
    assert "called a synchronizing CUDA operation" in found["error"]


def test_kernels_are_counted_and_do_nothing(script):
    found = script("""
x = torch.full((64, 64), 5.0).cuda()
for _ in range(3):
    x.add_(1)
x @ x
return {"values": x.cpu().unique().tolist()}
""")
    assert found["counts"]["launches"] == 3 and found["counts"]["library_calls"] == 1
    assert found["values"] == [5.0]


def test_memory_is_to_the_byte_and_has_an_end(script):
    found = script("""
torch.cuda.empty_cache()
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
x = torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")
del x
peak = torch.cuda.max_memory_allocated() - before
free, total = torch.cuda.mem_get_info()
try:
    torch.empty(2**38, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    return {"peak": peak, "total": total}
""")
    assert found["peak"] == 100 * 2**30 and found["total"] == 143771 * 2**20


def test_the_peak_of_a_step_by_hand(script):
    """Weight, input, product and the weight's gradient: 4 MiB each, and two numbers."""
    found = script("""
torch.cuda.empty_cache()
before = torch.cuda.memory_allocated()
weight = torch.empty(1024, 1024, device="cuda", requires_grad=True)
x = torch.empty(1024, 1024, device="cuda")
torch.cuda.reset_peak_memory_stats()
product = x * weight
loss = product.sum()
loss.backward()  # the gradient of the product is one number, expanded
return {"peak": torch.cuda.max_memory_allocated() - before}
""")
    # Blocks are multiples of 512 bytes: the loss, and the 1 that backward starts from.
    assert found["peak"] == 4 * 2**22 + 2 * 512


def test_a_capture_and_its_replay(script):
    counts = script(f"""{CAPTURE}
with torch.cuda.graph(graph, stream=side):
    y = x + 1
    other.wait_stream(side)
    with torch.cuda.stream(other):
        z = x * 2
    side.wait_stream(other)
graph.replay()
graph.replay()
""")["counts"]
    assert (counts["graphs"], counts["graph_launches"], counts["stray"]) == (1, 2, 0)
    assert counts["captured"] == 2 and counts["replayed"] == 4


def test_a_launch_beside_a_capture_is_counted(asked):
    found = asked(f"""{CAPTURE}
with torch.cuda.graph(graph, stream=side):
    y = x + 1
    with torch.cuda.stream(other):  # which has not joined
        torch.mul(x, 2, out=w)
""")
    assert found["counts"]["stray"] == 1


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("y.sum().item()", "StreamCaptureUnsupported"),
        ("x.copy_(torch.zeros(8))", "tensor is pinned"),
        ("other.wait_stream(side)\n    with torch.cuda.stream(other):\n        x * 2", "Unjoined"),
        ("side.wait_event(earlier)", "Isolation"),
    ],
)
@pytest.mark.few(2)
def test_what_cannot_be_captured_is_refused(asked, script, inside, message):
    found = asked(f"""{CAPTURE}
earlier = other.record_event()
with torch.cuda.graph(graph, stream=side):
    y = x + 1
    {inside}
""")
    assert message in found["trace"]
    # And the next one is not disturbed.
    script(CAPTURE + "with torch.cuda.graph(graph): x + 1")


def test_warnings_come_through(script):
    body = "import warnings\nwarnings.warn('planted')"
    assert "planted" in script(body)["warnings"][0]
    # BF16 weights that nobody has put into one buffer: a warning of torch's C++.
    found = script(
        "lstm = torch.nn.LSTM(8, 8).cuda().bfloat16()\n"
        'lstm(torch.zeros(2, 2, 8, device="cuda", dtype=torch.bfloat16))'
    )
    assert any("single contiguous chunk" in text for text in found["warnings"])


def test_counts_are_read_as_they_are_written():
    text = (ROOT / "tests" / "fake_cuda" / "counts.h").read_text()
    struct = text[text.index("{") + 1 : text.index("};")]
    lines = [line.partition("/*")[0] for line in struct.splitlines()]
    names = [n.strip(" ;") for line in lines for n in line.replace("unsigned long", "").split(",")]
    assert [name for name in names if name] == [name for name, _ in Counts._fields_]
