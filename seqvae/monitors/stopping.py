"""on_collapse="stop": a run that has collapsed is saved and ended.

In: a Trainer right behind an optimizer step, in all processes alike. Out: a checkpoint to go on from, and `PosteriorCollapsed`.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning import Trainer

from seqvae.monitors.detection.verdict import Verdict

COLLAPSED_EXIT_CODE = 7
CHECKPOINT = "collapsed.ckpt"


class PosteriorCollapsed(SystemExit):
    """Raised out of `Trainer.fit` once a checkpoint is saved. Ends a script with exit code 7.

    Processes that a Trainer spawned (`strategy="ddp_spawn"`) end with that code, too, but torch tells it in an exception of its
    own, `ProcessExitedException`.
    """

    def __init__(self, verdict: Verdict, code: int = COLLAPSED_EXIT_CODE) -> None:
        super().__init__(code)
        self.verdict = verdict


@runtime_checkable
class SavesLast(Protocol):
    """A callback that saves runs where they can be resumed from."""

    def save_last(self, trainer: Trainer) -> bool:
        """Whether this state is saved now."""


def save(trainer: Trainer, directory: Path) -> str:
    """By whoever saves this run, or else as a checkpoint of its own; return what became of the step, in words."""
    savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SavesLast)]
    if not savers:
        trainer.save_checkpoint(directory / CHECKPOINT)
        return f"is saved as {directory / CHECKPOINT}"
    saved = [saver.save_last(trainer) for saver in savers]
    return "is saved" if all(saved) else "could not be saved"
