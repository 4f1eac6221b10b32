"""Speech adds these rows to the tables of the core's tests."""

TINY = ["model=deep_speech2", "model.channels=2", "model.hidden_size=8", "data.batch_size=4"]
SMALL = {"speech": TINY}
LOSSES = {"deep_speech2": 0.1}
REFUSED = [
    (
        ["train.cuda_graph=on", "device=cuda", TINY[0], "data=speech_manifest", "data.root=."],
        "batches differ in length",
    ),
    (["train.compile=default", TINY[0]], "torch.compile passes over nn.LSTM, nn.GRU"),
]
RECIPES = {
    "deep_speech2_librispeech": """
        model.channels=32 model.frequency_kernels=[41,21] model.time_kernel=11
        model.frequency_stride=2 model.time_stride=2 model.hidden_size=2560 model.num_layers=3
        model.bidirectional=false model.row_convolution=20 model.fully_connected=2560
        data.sample_rate=16000 data.window_ms=20.0 data.hop_ms=10.0 optim.name=sgd
        optim.nesterov=true optim.momentum=0.99 optim.weight_decay=0.0 optim.schedule=epoch_decay
        optim.constant_epochs=1.0 train.epochs=20 data.batch_size=64
        train.accumulate=8 train.clip_norm=400.0 compare.metric=cer compare.margin=0.5
    """,
}
SCHEDULES = [
    (
        "deep_speech2_librispeech",
        549,  # of 8 x 64 of the 281,241 utterances of train-960, were none above 16.7 s
        20 * 549,
        {0: 3e-4, 548: 3e-4, 549: 3e-4 * 0.8333333, 20 * 549 - 1: 3e-4 * 0.8333333**19},
    ),
]
HIDDEN = {
    "deep_speech2": (
        {"frequencies": 64, "num_symbols": 9, "num_layers": 1},
        "recurrent.0.forwards.weight_ih_l0 recurrent.0.forwards.weight_hh_l0 connected.0",
        "output",
    )
}
