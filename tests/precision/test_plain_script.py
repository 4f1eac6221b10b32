"""The example in the docstring of mprun.precision runs as it is written."""

import textwrap

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import mprun.precision


def test_the_docstring_example():
    torch.manual_seed(0)
    text = mprun.precision.__doc__
    example = textwrap.dedent(text[text.index("    policy =") :])
    model, lr = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 0.1
    inputs, labels = torch.randn(32, 8), torch.randint(3, (32,))
    names = {
        **{name: getattr(mprun.precision, name) for name in mprun.precision.__all__},
        "SGD": SGD,
        "cross_entropy": cross_entropy,
        "model": model,
        "lr": lr,
        "device": torch.device("cpu"),
        "batches": [(inputs, labels)] * 50,
    }
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    reference.load_state_dict(model.state_dict())
    exec(compile(example, "example", "exec"), names)  # noqa: S102
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    masters = names["optimizer"].masters
    assert all(torch.equal(p, masters[n].half()) for n, p in model.named_parameters())

    optimizer = SGD(reference.parameters(), lr)
    for _ in range(50):
        optimizer.zero_grad()
        cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    for name, parameter in reference.named_parameters():
        # 50 updates of at most 0.1 |gradient| <= 0.1, with relative errors of a few 2^-11 each.
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=0, atol=50 * 0.1 * 2e-3)
        assert not torch.equal(masters[name], parameter)
