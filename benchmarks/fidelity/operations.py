"""The compared operations: inputs by name, and how to run them.

Weights are drawn so that outputs are about as large as inputs. A case names the tensors that stay
in float32 (parameters of norm layers in every mode with master weights).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.models.classifiers import LocalResponseNorm

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at one size.

    name: name of the operation. size: text for the table. draw: inputs in float64 (integers as
    int64) from a generator. run: computes outputs from inputs, by name, on any dtype and device.
    float32: the inputs that are not cast to the 16-bit dtype. scaled: the input that the magnitude
    multiplies.
    """

    name: str
    size: str
    draw: Callable[[torch.Generator], Tensors]
    run: Callable[[Tensors], Tensors]
    float32: tuple[str, ...] = ()
    scaled: str = "x"


def normal(generator: torch.Generator, *shape: int, over: int = 1) -> Tensor:
    """Draw standard normal values, cut at 3.9, divided by sqrt(`over`); float64 on the CPU."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.clamp(-3.9, 3.9) / math.sqrt(over)


def operations(full: bool) -> list[Operation]:
    """Return every operation in several sizes; without `full` those fit for native half kernels."""
    k = 2 if full else 1
    return [
        *_products(k),
        *_convolutions(k),
        *_embeddings(k),
        *_recurrent(k),
        *_normalisation(k),
        *_element_wise(k),
        *_pooling(k),
    ]


def _products(k: int) -> list[Operation]:
    def linear(batch: int, inputs: int, outputs: int) -> Operation:
        return Operation(
            "linear",
            f"{batch}x{inputs}->{outputs}",
            lambda g: {
                "x": normal(g, batch, inputs),
                "weight": normal(g, outputs, inputs, over=inputs),
                "bias": normal(g, outputs),
            },
            lambda t: {"output": F.linear(t["x"], t["weight"], t["bias"])},
        )

    def matmul(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> Operation:
        return Operation(
            name,
            f"{'x'.join(map(str, a))} @ {'x'.join(map(str, b))}",
            lambda g: {"x": normal(g, *a), "y": normal(g, *b, over=a[-1])},
            lambda t: {"output": t["x"] @ t["y"]},
        )

    return [
        linear(64 * k, 256 * k, 128 * k),
        linear(7, 33, 5),
        linear(16, 4096 * k, 64),
        matmul("matmul", (96, 64 * k), (64 * k, 80)),
        matmul("matmul", (16, 8192 * k), (8192 * k, 16)),
        matmul("bmm", (4 * k, 24, 64), (4 * k, 64, 32)),
        matmul("bmm", (3, 5, 17), (3, 17, 9)),
    ]


def _convolutions(k: int) -> list[Operation]:
    def conv(
        kernel: int, inputs: int, outputs: int, size: int, stride=1, groups=1, nhwc=False
    ) -> Operation:
        fan_in = inputs // groups * kernel**2
        layout = torch.channels_last if nhwc else torch.contiguous_format
        return Operation(
            f"conv {kernel}x{kernel}"
            + (f" s{stride}" if stride > 1 else "")
            + (f" groups {groups}" if groups > 1 else "")
            + (" channels_last" if nhwc else ""),
            f"{4 * k}x{inputs}x{size}x{size}->{outputs}",
            lambda g: {
                "x": normal(g, 4 * k, inputs, size, size),
                "weight": normal(g, outputs, inputs // groups, kernel, kernel, over=fan_in),
                "bias": normal(g, outputs),
            },
            lambda t: {
                "output": F.conv2d(
                    t["x"].contiguous(memory_format=layout),
                    t["weight"].contiguous(memory_format=layout),
                    t["bias"],
                    stride,
                    kernel // 2,
                    groups=groups,
                )
            },
        )

    def transposed(kernel: int, stride: int, padding: int, inputs: int, outputs: int, size: int):
        return Operation(
            f"conv_transpose {kernel}x{kernel} s{stride}",
            f"{4 * k}x{inputs}x{size}x{size}->{outputs}",
            lambda g: {
                "x": normal(g, 4 * k, inputs, size, size),
                "weight": normal(
                    g, inputs, outputs, kernel, kernel, over=inputs * (kernel // stride) ** 2
                ),
                "bias": normal(g, outputs),
            },
            lambda t: {
                "output": F.conv_transpose2d(t["x"], t["weight"], t["bias"], stride, padding)
            },
        )

    return [
        conv(1, 32 * k, 32, 14),
        conv(3, 16 * k, 16 * k, 14 * k),
        conv(3, 16 * k, 16 * k, 14 * k, nhwc=True),
        conv(3, 5, 7, 9),
        conv(7, 3, 16 * k, 28 * k, stride=2),
        conv(3, 16 * k, 16 * k, 14, groups=2),
        conv(3, 16 * k, 16 * k, 14, groups=16 * k),
        transposed(4, 2, 1, 32 * k, 16, 8),
        transposed(4, 1, 0, 50 * k, 32 * k, 1),
    ]


def _embeddings(k: int) -> list[Operation]:
    def embedding(rows: int, hits: int) -> Operation:
        return Operation(
            "embedding",
            f"{hits} hits on {rows} rows",
            lambda g: {
                "x": normal(g, rows, 16),
                "indices": torch.randint(rows, (hits,), generator=g),
            },
            lambda t: {"output": F.embedding(t["indices"], t["x"])},
        )

    # CUDA has one kernel up to 3072 indices and another above.
    return [embedding(4, 8192), embedding(4, 2048), embedding(1000, 4096 * k)]


def _recurrent(k: int) -> list[Operation]:
    def lstm(layers: int, inputs: int, hidden: int, projection: int, steps: int) -> Operation:
        batch, width = 8 * k, projection or hidden

        def draw(g: torch.Generator) -> Tensors:
            tensors = {
                "x": normal(g, steps, batch, inputs),
                "h0": normal(g, layers, batch, width, over=4),
                "c0": normal(g, layers, batch, hidden, over=4),
            }
            for layer in range(layers):
                rows, columns = 4 * hidden, width if layer else inputs
                tensors[f"w_ih_{layer}"] = normal(g, rows, columns, over=columns)
                tensors[f"w_hh_{layer}"] = normal(g, rows, width, over=width)
                tensors[f"b_ih_{layer}"] = normal(g, rows, over=16)
                tensors[f"b_hh_{layer}"] = normal(g, rows, over=16)
                if projection:
                    tensors[f"w_hr_{layer}"] = normal(g, width, hidden, over=hidden)
            return tensors

        def run(t: Tensors) -> Tensors:
            flat = [tensor for name, tensor in t.items() if name not in ("x", "h0", "c0")]
            with warnings.catch_warnings():
                # cuDNN packs weights that do not lie in one block, with a warning.
                warnings.filterwarnings("ignore", message="RNN module weights")
                # The native reference on a CPU is decomposed, as intended here.
                warnings.filterwarnings("ignore", message="LSTM with projections")
                outputs = torch.lstm(
                    t["x"], (t["h0"], t["c0"]), flat, True, layers, 0.0, True, False, False
                )
            return dict(zip(("output", "h_n", "c_n"), outputs, strict=True))

        kind = "lstm projected" if projection else "lstm"
        size = f"{layers}x{hidden}" + (f"->{projection}" if projection else "")
        return Operation(kind, f"{size}, {steps} steps, batch {batch}", draw, run)

    return [
        lstm(1, 32, 64, 0, 10 * k),
        lstm(2, 32, 32 * k, 0, 10),
        lstm(1, 32, 64, 16, 10 * k),
        lstm(2, 32, 32 * k, 16, 10),
    ]


def _normalisation(k: int) -> list[Operation]:
    def batch_norm(t: Tensors) -> Tensors:
        return {"output": F.batch_norm(t["x"], None, None, t["weight"], t["bias"], training=True)}

    def draw_images(g: torch.Generator) -> Tensors:
        channels = 16 * k
        return {
            "x": normal(g, 8, channels, 14, 14),
            "weight": 1 + normal(g, channels, over=16),
            "bias": normal(g, channels),
        }

    def draw_rows(g: torch.Generator) -> Tensors:
        return {
            "x": normal(g, 64, 128 * k),
            "weight": 1 + normal(g, 128 * k, over=16),
            "bias": normal(g, 128 * k),
        }

    return [
        Operation(
            "batch_norm, FP32 parameters",
            f"8x{16 * k}x14x14",
            draw_images,
            batch_norm,
            float32=("weight", "bias"),
        ),
        Operation("batch_norm", f"8x{16 * k}x14x14", draw_images, batch_norm),
        Operation(
            "layer_norm",
            f"64x{128 * k}",
            draw_rows,
            lambda t: {"output": F.layer_norm(t["x"], t["weight"].shape, t["weight"], t["bias"])},
        ),
        Operation(
            "local_response_norm",
            f"4x{16 * k}x14x14",
            lambda g: {"x": normal(g, 4, 16 * k, 14, 14)},
            lambda t: {"output": LocalResponseNorm(5, 1e-4, 0.75, 2.0)(t["x"])},
        ),
    ]


def _element_wise(k: int) -> list[Operation]:
    def unary(name: str, function: Callable[[Tensor], Tensor]) -> Operation:
        return Operation(
            name,
            f"{4096 * k}",
            lambda g: {"x": normal(g, 4096 * k)},
            lambda t: {"output": function(t["x"])},
        )

    def draw_logits(g: torch.Generator) -> Tensors:
        classes = 500 * k
        return {
            "x": 3 * normal(g, 64, classes),
            "labels": torch.randint(classes, (64,), generator=g),
        }

    return [
        unary("relu", F.relu),
        unary("leaky_relu 0.2", lambda x: F.leaky_relu(x, 0.2)),
        unary("tanh", torch.tanh),
        unary("sigmoid", torch.sigmoid),
        unary("dropout 0", lambda x: F.dropout(x, 0.0, training=True)),
        Operation(
            "log_softmax",
            f"64x{500 * k}",
            draw_logits,
            lambda t: {"output": F.log_softmax(t["x"], 1)},
        ),
        Operation(
            "cross_entropy",
            f"64x{500 * k}",
            draw_logits,
            lambda t: {"output": F.cross_entropy(t["x"], t["labels"])},
        ),
        Operation(
            "cross_entropy, FP32 logits",
            f"64x{500 * k}",
            draw_logits,
            # float64 inputs are not cast: they are the exact reference.
            lambda t: {
                "output": F.cross_entropy(
                    t["x"].float() if t["x"].dtype.itemsize == 2 else t["x"], t["labels"]
                )
            },
        ),
    ]


def _pooling(k: int) -> list[Operation]:
    def pooled(name: str, function: Callable[[Tensor], Tensor]) -> Operation:
        return Operation(
            name,
            f"4x{8 * k}x15x15",
            lambda g: {"x": normal(g, 4, 8 * k, 15, 15)},
            lambda t: {"output": function(t["x"])},
        )

    return [
        pooled("max_pool 3x3 s2", lambda x: F.max_pool2d(x, 3, 2, 1)),
        pooled("avg_pool 3x3 s2", lambda x: F.avg_pool2d(x, 3, 2, 1)),
        pooled("adaptive_avg_pool 1x1", lambda x: F.adaptive_avg_pool2d(x, 1)),
        pooled("mean", lambda x: x.mean((2, 3))),
    ]
