"""The operations that run, as the dispatcher sees them."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Remembers the operations that reach it, in order."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [func.overloadpacket.__name__ for func in self.ran]
