"""timm's training step: create_optimizer_v2, its NativeScaler around GradScaler, its autocast.

It follows train_one_epoch of timm's train.py (huggingface/pytorch-image-models): autocast around
model and loss function, then backward, clipping, step and update with or without the scaler;
gradients are cleared at the end. It leaves out logging and the device synchronisation, which newer
versions have behind --synchronize-step and older ones in every step: both only slow it down.
"""

from contextlib import nullcontext

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler, dispatch_clip_grad
from torch import Tensor, nn

from benchmarks.suite.peers.amp import AUTOCAST
from benchmarks.suite.peers.optimizers import groups_of
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch


def make_timm(task: PeerTask) -> Peer:
    """timm's step on mprun's model, NCHW, with the optimizer implementation that torch chooses."""
    (model,) = task.networks
    optimizer = _optimizer(task, model)
    scaler = NativeScaler(device=task.device.type) if task.mode == "amp" else None
    skips = None if scaler is None else SkipCount([optimizer])
    settings = {"optimizer": "default", "channels_last": False, "compile": "off"}
    return Peer(task, settings, _step(task, model, optimizer, scaler), skips)


def _step(task: PeerTask, model: nn.Module, optimizer, scaler: NativeScaler | None):
    smoothing, clip_norm = task.config.model.label_smoothing, task.clip_norm
    loss_function = LabelSmoothingCrossEntropy(smoothing) if smoothing else nn.CrossEntropyLoss()
    dtype = AUTOCAST.get(task.mode)

    def autocast():
        return nullcontext() if dtype is None else torch.autocast(task.device.type, dtype=dtype)

    def train(batch: Batch) -> Tensor:
        images, labels = batch
        with autocast():
            loss = loss_function(model(images), labels)
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=clip_norm, parameters=model.parameters())
        else:
            loss.backward()
            if clip_norm is not None:
                dispatch_clip_grad(model.parameters(), clip_norm, mode="norm")
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def _optimizer(task: PeerTask, model: nn.Module) -> torch.optim.Optimizer:
    config = task.config.optim
    # timm's "sgd" is Nesterov's; the classical one is "momentum".
    names = {"sgd": "sgd" if config.nesterov else "momentum"}
    numbers = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config.name:
        case "sgd":
            numbers["momentum"] = config.momentum or 0.0
        case "adam" | "adamw":
            numbers["betas"] = tuple(config.betas or (0.9, 0.999))
            numbers["eps"] = 1e-8 if config.eps is None else config.eps
        case "adagrad":
            numbers["initial_accumulator_value"] = config.initial_accumulator or 0.0
            numbers["eps"] = 1e-10 if config.eps is None else config.eps
    opt = names.get(config.name, config.name)
    return create_optimizer_v2(groups_of(config, model), opt=opt, **numbers)
