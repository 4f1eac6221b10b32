"""Detection adds these rows to the tables of the core's tests."""

FEW = ["data.batch_size=2", "data.train_size=16", "data.eval_size=4"]
SMALL = {"detection": ["model=ssd_mini", *FEW], "two_stages": ["model=faster_rcnn", *FEW]}
LOSSES = {"ssd_mini": 0.5, "ssd300": 0.9, "faster_rcnn": 0.5}
RECIPES = {
    # Of 120,000 updates 80,000 and 100,000, as the test of rates holds.
    "ssd300_voc": """
        data.name=voc data.years=2007+2012 data.difficult=true data.image_size=300
        data.batch_size=32 optim.name=sgd optim.lr=0.001 optim.momentum=0.9
        optim.weight_decay=0.0005 optim.schedule=step optim.milestones=[0.6666666,0.8333333]
        train.steps=120000 compare.metric=map compare.margin=0.5
    """,
    "faster_rcnn_voc": """
        model.name=faster_rcnn model.variant=vgg16 model.dropout=0.5 model.frozen=4
        data.name=voc data.years='2007' data.difficult=false data.augmentation=flip
        data.batch_size=1 data.image_size=600 data.value_range=mean_subtracted train.accumulate=2
        train.steps=70000 optim.name=sgd
        optim.nesterov=false optim.lr=0.001 optim.momentum=0.9 optim.weight_decay=0.0005
        optim.bias_lr_factor=2.0 optim.decay_bias=false compare.metric=map compare.margin=0.5
    """,
}
SCHEDULES = [
    # 16,551 images of VOC 2007 and 2012.
    ("ssd300_voc", 517, 120_000, {0: 1e-3, 79_999: 1e-3, 80_000: 1e-4, 100_000: 1e-5}),
    # 5,011 images give 2,505 updates of two.
    ("faster_rcnn_voc", 2505, 70_000, {0: 1e-3, 49_999: 1e-3, 50_000: 1e-4, 69_999: 1e-4}),
]
HIDDEN = {
    "ssd_mini": ({"num_classes": 10, "image_size": 32}, "", ""),
    "ssd300": ({"num_classes": 20}, "", ""),
    "faster_rcnn": ({"num_classes": 10, "image_size": 32}, "head.1 head.4", "classes offsets"),
    "faster_rcnn vgg16": (
        {"num_classes": 20, "image_size": 600},
        "head.1 head.4",
        "classes offsets",
    ),
}
