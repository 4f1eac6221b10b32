"""How many updates a 16-bit format would have lost, on the host; imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

FORMATS = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """Counts over the weights of a module or a model.

    total: all weights. zero: those whose update is exactly 0. nonfinite: weight or update is NaN
    or infinite. fp16, bf16: of the others those whose update rounds away in that format.
    """

    total: int = 0
    zero: int = 0
    nonfinite: int = 0
    fp16: int = 0
    bf16: int = 0

    @property
    def nonzero(self) -> int:
        """Finite non-zero updates: what the shares are parts of."""
        return self.total - self.zero - self.nonfinite

    def share(self, format: str) -> float:
        """Part (0 to 1) of the non-zero updates that are lost; 0 where there are none.

        format: "fp16" or "bf16"; ValueError otherwise.
        """
        if format not in FORMATS:
            raise ValueError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
        return getattr(self, format) / self.nonzero if self.nonzero else 0.0

    def merge(self, other: "LostUpdates") -> "LostUpdates":
        """The counts over the weights of both."""
        own, others = asdict(self), asdict(other)
        return LostUpdates(**{name: own[name] + others[name] for name in own})

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping) -> "LostUpdates":
        """The inverse of `to_json`; TypeError or ValueError for anything else."""
        return cls(**{name: int(count) for name, count in content.items()})
