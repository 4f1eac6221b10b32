"""Tensors with shape, dtype and history, and no values."""

from torch._subclasses.fake_tensor import FakeTensorMode


def weightless() -> FakeTensorMode:
    """A mode in which every new tensor is of this kind.

    An operator that torch cannot carry out without values is an error; its fallback would compute
    with real tensors of full size.
    """
    mode = _Weightless(allow_fallback_kernels=False)
    mode.fake_tensor_converter.meta_converter.tensor_memo = _Newest()
    return mode


class _Weightless(FakeTensorMode):
    def __deepcopy__(self, memo):
        # A copied module stays in the same mode (torch.nn.TransformerEncoder copies its layers).
        return self


class _Newest(dict):
    """The memo of the mode, in place of its own, whose weak references to all tensors keep a
    parameter from changing its dtype (torch.utils.swap_tensors). Only the newest is asked for."""

    def __setitem__(self, key, value):
        self.clear()
        super().__setitem__(key, value)
