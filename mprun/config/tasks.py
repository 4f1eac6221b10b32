"""What kind of task a model is for."""

from mprun.config import schema

TASKS = {
    "alexnet": "classification",
    "resnet50": "classification",
    "lstm_lm": "language_model",
    "dcgan": "gan",
    "conv_autoencoder": "reconstruction",
}


def task_of(model: schema.ModelConfig) -> str:
    """classification, language_model, gan or reconstruction."""
    if isinstance(model, schema.CustomModelConfig):
        return model.task
    return TASKS[model.name]
