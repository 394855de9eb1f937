"""The end of an autoencoder's pretraining (--pretrain_autoencoder): from here on the run is that of a variational autoencoder.

In: a run that comes to the step. Out: with --reset_decoder a decoder that starts from scratch; posteriors, verdicts and the best
checkpoint are counted from here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from seqvae.errors import UsageError
from seqvae.models.backbones import Decoder
from seqvae.models.vae import SequenceVAE
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.training.callbacks.checkpoint import Checkpoints, is_between_steps
from seqvae.training.callbacks.interrupt import EarlyStopping
from seqvae.training.module import TrainingModule
from seqvae.training.sharding import load_whole

PRETRAINED = "autoencoder_pretrained"
"""The event that the pretraining has ended."""


class EndOfPretraining(Callback):
    """Callback that ends the pretraining, behind the monitors and before what saves checkpoints."""

    def __init__(self, monitors: Sequence[PosteriorMetricsMonitor], steps: int, *, resets_decoder: bool) -> None:
        self.monitors, self.steps, self.resets_decoder = monitors, steps, resets_decoder
        self._done_at = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, TrainingModule)
        if self.resets_decoder and not isinstance(pl_module.network, SequenceVAE):
            raise UsageError(
                f"--reset_decoder: {type(pl_module.network).__name__} has no decoder of ours; leave it out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a checkpoint that stands at the step as one from behind it, which it is."""
        assert isinstance(pl_module, TrainingModule)
        self._done_at = trainer.global_step
        if pl_module.events is not None:
            pl_module.events.start_after(PRETRAINED, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step != self.steps or step == self._done_at or not is_between_steps(trainer):
            return
        assert isinstance(pl_module, TrainingModule)
        self._done_at, what = step, "the KL has a weight from now on"
        if self.resets_decoder:
            start_decoder_over(trainer, pl_module)
            what = f"the decoder starts from scratch, and {what}"
        forget_what_was_best(trainer)
        message = f"the autoencoder is pretrained: {what}"
        for monitor in self.monitors:
            monitor.start_over(trainer, pl_module, "the autoencoder's pretraining has just ended")
        if pl_module.events is not None:
            pl_module.events.survived(PRETRAINED, step, message)


def start_decoder_over(trainer: Trainer, module: TrainingModule) -> None:
    """Give the decoder the weights of another beginning, the same in all processes, and the optimizer no memory of it."""
    network = module.network
    if not (isinstance(network, SequenceVAE) and isinstance(network.decoder, Decoder)):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(module.seed)
        fresh = Decoder(network.settings)
    load_whole(network.decoder, fresh.state_dict())
    for optimizer in trainer.optimizers:
        for weight in network.decoder.parameters():
            optimizer.state.pop(weight, None)
    if module.average is not None:
        module.average.start_over()


def forget_what_was_best(trainer: Trainer) -> None:
    """Search for the best again, and count patience again, as another objective is trained from now on."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # set by Lightning, and declared nowhere
    for callback in callbacks:
        if isinstance(callback, Checkpoints):
            callback.forget_best()
        elif isinstance(callback, EarlyStopping):
            callback.start_over()
