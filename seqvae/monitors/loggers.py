"""Texts, pictures and verdicts in the Trainer's loggers, whose numbers go by `log_metrics`.

In: a logger of Lightning, a name, a step. Out: an entry where TensorBoard, Weights & Biases or MLflow show such things. Other
loggers, which keep numbers alone, are passed over.
"""

from pathlib import Path
from textwrap import indent

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger


def log_text(logger: Logger, name: str, text: str, step: int) -> None:
    """Log a text; TensorBoard, which reads Markdown, shows several lines as they are."""
    match logger:
        case TensorBoardLogger():
            logger.experiment.add_text(name, indent(text, "    ") if "\n" in text else text, step)
        case WandbLogger():
            logger.log_text(name, columns=["step", "text"], data=[[str(step), text]])
        case MLFlowLogger():
            logger.experiment.log_text(logger.run_id, text, f"{name}/step-{step:07}.txt")


def log_picture(logger: Logger, name: str, path: Path, step: int) -> None:
    """Log what a PNG file holds at this step."""
    match logger:
        case TensorBoardLogger():
            logger.experiment.add_image(name, _pixels(path), step, dataformats="HWC")
        case WandbLogger():
            logger.log_image(name, images=[str(path)], step=step)
        case MLFlowLogger():
            logger.experiment.log_image(logger.run_id, _pixels(path), key=name, step=step)


def log_verdict(logger: Logger, name: str, verdict: str, sentence: str, step: int) -> None:
    """Log a change of verdict: its sentence, and the verdict itself where runs are listed by such facts."""
    log_text(logger, f"{name}/verdicts", sentence, step)
    match logger:
        case WandbLogger():
            logger.experiment.summary[f"{name}/verdict"] = verdict
        case MLFlowLogger():
            logger.experiment.set_tag(logger.run_id, f"{name}/verdict", verdict)


def _pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread  # 0.3 s, which a run without such a logger need not wait for

    return imread(path)
