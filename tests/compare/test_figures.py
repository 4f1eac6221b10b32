from .made_comparison import comparison


def test_a():
    assert comparison()
