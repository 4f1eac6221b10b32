"""Audio files as waves, and waves as log spectrograms.

The standard library reads WAV: 8, 16, 24 and 32 bit PCM. soundfile reads what else libsndfile
knows, FLAC and Ogg among it. Channels are averaged, nothing is resampled.
"""

import wave
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mprun.data.image_files import printable
from mprun.data.source import DamagedData, reading

_FULL_SCALE = {1: 2**7, 2: 2**15, 3: 2**23, 4: 2**31}  # by the bytes of a sample


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """log(1 + magnitude) of windows of a wave, standardised over the utterance.

    `sample_rate` is in samples per second; ValueError if window or hop is too short there.
    """

    sample_rate: int
    window_ms: float
    hop_ms: float

    def __post_init__(self) -> None:
        if self.window < 2 or self.hop < 1:
            which = "window_ms" if self.window < 2 else "hop_ms"
            said = f"{which}={getattr(self, which):g}"
            raise ValueError(f"{said}: is too short at sample_rate={self.sample_rate}")

    @property
    def window(self) -> int:
        """Return the length of a window in samples."""
        return round(self.sample_rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Return the samples from one window to the next."""
        return round(self.sample_rate * self.hop_ms / 1000)

    @property
    def frequencies(self) -> int:
        """Return the number of rows, that of a window's real Fourier transform."""
        return self.window // 2 + 1

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 `[frequencies, 1 + samples // hop]` for float32 `[samples]`, not empty."""
        hann = torch.hann_window(self.window)
        spectrum = torch.from_numpy(samples).stft(
            self.window, self.hop, window=hann, pad_mode="constant", return_complex=True
        )
        # NumPy's sums do not depend on the number of threads.
        rows = np.log1p(np.abs(spectrum.numpy()))
        mean, deviation = rows.mean(dtype=np.float64), rows.std(dtype=np.float64)
        return (rows - np.float32(mean)) / np.float32(max(deviation, 1e-5))


def read_audio(path: str, sample_rate: int) -> np.ndarray:
    """Read float32 `[samples]` in -1 ... 1, channels averaged; DamagedData names the file.

    ValueError if it is no WAV file and soundfile is not installed.
    """
    shown = printable(path)
    samples, rate = (_read_wav if path.lower().endswith(".wav") else _read_other)(path, shown)
    if rate != sample_rate:
        raise DamagedData(
            f"{shown}: has {rate} samples per second, must have data.sample_rate={sample_rate}"
        )
    if not len(samples):
        raise DamagedData(f"{shown}: has no samples")
    return samples.mean(1, dtype=np.float64).astype(np.float32)


def _read_other(path: str, shown: str) -> tuple[np.ndarray, int]:
    library = _soundfile()
    try:
        return library.read(path, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise DamagedData(f"{shown}: cannot be read: {error}") from error


def _soundfile() -> Any:
    try:
        import soundfile  # imported here: files of WAV need none
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise ValueError(
            f"root: reading audio files other than WAV needs soundfile (pip install soundfile): "
            f"{error}"
        ) from error
    return soundfile


def _read_wav(path: str, shown: str) -> tuple[np.ndarray, int]:
    try:
        with reading(f"{shown}: cannot be read"), wave.open(path, "rb") as file:
            channels, width, rate, promised, *_ = file.getparams()
            content = file.readframes(promised)
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a chunk beyond its file
        reason = str(error) or "it ends"
        raise DamagedData(f"{shown}: must be a WAV file of PCM samples: {reason}") from error
    if width not in _FULL_SCALE:
        raise DamagedData(f"{shown}: has {8 * width} bit samples, must have 8, 16, 24 or 32 bits")
    if promised == 0 or len(content) < promised * width * channels:
        raise DamagedData(f"{shown}: is cut short, or has no samples")
    return _pcm(content, width).reshape(-1, channels) / _FULL_SCALE[width], rate


def _pcm(content: bytes, width: int) -> np.ndarray:
    """Return little-endian samples as int32; samples of one byte have their zero at 128."""
    if width == 1:
        return np.frombuffer(content, np.uint8).astype(np.int32) - 128
    if width == 3:
        whole = np.zeros((len(content) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return whole.view("<i4")[:, 0] >> 8
    return np.frombuffer(content, f"<i{width}").astype(np.int32)


def seconds_of(path: str) -> float:
    """Return how long a file is; 0.0 if it cannot be read: whoever reads it reports the fault."""
    try:
        if not path.lower().endswith(".wav"):
            return _soundfile().info(path).duration
        with wave.open(path, "rb") as file:
            return file.getnframes() / file.getframerate()
    except (OSError, RuntimeError, wave.Error, EOFError, ZeroDivisionError):
        return 0.0
