"""The records of a run: metrics.jsonl, its TensorBoard view, and grids of generated images."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from mprun.errors import Damaged
from mprun.file_system import sync
from mprun.record.metrics_columns import NON_FINITE, complete_lines, parsed_json
from mprun.record.run_directory import plain, replacing
from mprun.record.seal import content_of

_ENCODER = json.JSONEncoder(allow_nan=False)  # `json.dumps` would build one for each record


class MetricsFile:
    """Append JSON objects, one a line and flushed: a killed run tears at most the last line.

    JSON has no NaN: non-finite numbers are the strings "NaN", "Infinity" and "-Infinity".
    Floats are written so that reading returns the same bits.
    """

    def __init__(self, path: Path):
        self.file = open(path, "ab")  # noqa: SIM115 - lives as long as the run
        written = path.read_bytes()
        self.bytes, self._hash = len(written), hashlib.sha256(written)

    def write(self, record: dict[str, Any]) -> None:
        line = f"{_ENCODER.encode(plain(record))}\n".encode()
        self.file.write(line)
        self.file.flush()
        self.bytes += len(line)
        self._hash.update(line)

    def so_far(self) -> dict[str, Any]:
        """Return size and SHA-256 of the file so far, for a checkpoint's manifest."""
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        """Force the records onto the disk and close the file."""
        sync(self.file)
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all records of a metrics.jsonl, a missing one as empty, as `parsed_metrics` does."""
    return parsed_metrics(path, content_of(path.parent, path.name, missing=b""))


def parsed_metrics(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Return the records; skip a torn last line, raise Damaged for another that is no record."""
    lines = enumerate(complete_lines(data), start=1)
    found = []
    for number, record in ((n, parsed_json(path, n, line)) for n, line in lines if line):
        if not isinstance(record, dict):
            raise Damaged(f"{path}: line {number} is not a record of a run")
        found.append(
            {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}
        )
    return found


def metrics_until(path: Path, last_step: int, so_far: dict[str, Any]) -> bytes:
    """Return the content up to `last_step`, after which a resumed run writes on, bit-equal.

    so_far: the result of `MetricsFile.so_far` at that step; Damaged if the records up to it are
    not those that the run wrote.
    """
    data = content_of(path.parent, path.name, missing=b"")
    try:
        data = data[: so_far["bytes"]]
        whole = hashlib.sha256(data).hexdigest() == so_far["sha256"]
    except (LookupError, TypeError):
        whole = False
    if not whole:
        raise Damaged(f"{path}: was changed since the checkpoint of step {last_step}")
    return data


class TensorBoardView:
    """Mirror records as scalars `train/...` and `eval/...` in the run directory itself.

    Each event wakes the writer's thread, which would double the time of a short step. The training
    records of up to two seconds are therefore handed over together. Without TensorBoard `writer` is
    None, and nothing is written.
    """

    TOGETHER_S: ClassVar = 2.0

    def __init__(self, directory: Path, purge_step: int | None = None):
        self.writer: Any = None
        self._waiting: list[tuple[float, dict[str, Any]]] = []
        try:
            # Imported here: reading records must not need torch.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        # After a resume, purge_step hides the points that will be written again.
        self.writer = SummaryWriter(str(directory), flush_secs=10, purge_step=purge_step)

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of one record at its step; only the metrics of an evaluation."""
        if self.writer is None:
            return
        now = time.time()
        self._waiting.append((now, record))
        if record["split"] == "eval" or now - self._waiting[0][0] > self.TOGETHER_S:
            self._hand_over()

    def _hand_over(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for written, record in self._waiting:
            left_out = {"split", "step", "epoch"}
            if record["split"] == "eval":
                left_out |= {"updates", "skipped", "seconds"}
            values = [
                Summary.Value(tag=f"{record['split']}/{key}", simple_value=value)
                for key, value in record.items()
                if key not in left_out and isinstance(value, (int, float))
            ]
            # One event: an event for each number would take several times as long.
            summary = Summary(value=values)
            self.writer.file_writer.add_summary(summary, record["step"], written)
        self._waiting.clear()

    def image(self, tag: str, image, step: int) -> None:
        """Add an image, float [channels, height, width] in [0, 1]."""
        if self.writer is not None:
            self.writer.add_image(tag, image, step)

    def hyperparameters(self, values: dict[str, Any], tags: Iterable[str]) -> None:
        """Add an entry to the HPARAMS page, in this same run (add_hparams would make another).

        tags: scalars whose newest value is shown beside the hyperparameters.
        """
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(values, dict.fromkeys(tags)):
            self.writer.file_writer.add_summary(summary)

    def close(self) -> None:
        if self.writer is not None:
            self._hand_over()
            self.writer.close()


def write_sample_grid(directory: Path, step: int, images):
    """Write images, float [n, 1 or 3, height, width] in [0, 1], as samples/step-NNNNNNNN.png.

    The grid has 8 columns, its numbers 8 bits, rounded. The file appears whole or not at all.
    Returns the grid as floats.
    """
    # Imported here: reading records must need neither torch nor Pillow.
    from PIL import Image
    from torchvision.utils import make_grid

    grid = make_grid(images, nrow=8)
    pixels = grid.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).byte().numpy()
    path = directory / "samples" / f"step-{step:08}.png"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        Image.fromarray(pixels).save(file, format="PNG")
    return grid


def drop_later(directory: Path, last_step: int) -> None:
    """Remove grids and probes after `last_step`; the resumed run makes them again."""
    for path in [*directory.glob("samples/step-*.png"), *directory.glob("numerics/step-*.json")]:
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > last_step:
            path.unlink()
