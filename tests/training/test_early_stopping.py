"""When a run ends because it no longer gets better: what is counted, and what is compared with what."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from seqvae.training.callbacks.interrupt import EarlyStopping


def validate(callback: EarlyStopping, step: int, elbo: float, sequences: int = 200) -> bool:
    """Let the callback see a validation; return whether it ends the run."""
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        sanity_checking=False,
        fast_dev_run=False,
        should_stop=False,
        current_epoch=0,
        global_step=step,
        callback_metrics={"valid_elbo": torch.tensor(elbo), "valid_sequences": torch.tensor(float(sequences))},
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, **_: decision),
    )
    callback.on_validation_end(trainer, SimpleNamespace())  # type: ignore[arg-type]
    return bool(trainer.should_stop)


def test_validations_before_the_full_weight_neither_count_nor_set_the_mark():
    callback = EarlyStopping(2, lambda step: step >= 100)
    assert [validate(callback, step, -step) for step in range(10, 101, 10)] == [False] * 10
    assert [validate(callback, step, -400 - step) for step in (110, 120, 130)] == [False, False, True]


def test_elbos_of_other_sequences_are_counted_anew():
    callback = EarlyStopping(1, lambda step: True)
    assert not validate(callback, 10, -100)
    assert not validate(callback, 20, -150, sequences=2000)
    assert validate(callback, 30, -151, sequences=2000)


def test_a_run_that_goes_on_counts_on_by_the_patience_it_is_given():
    before = EarlyStopping(1, lambda step: True)
    assert [validate(before, step, -step) for step in (1, 2)] == [False, True]
    after = EarlyStopping(3, lambda step: True)
    assert after.state_key == before.state_key == "EarlyStopping{'monitor': 'valid_elbo', 'mode': 'max'}"
    after.load_state_dict(before.state_dict())
    assert [validate(after, step, -step) for step in (3, 4)] == [False, True]


def test_a_rescue_has_the_best_elbo_so_far_forgotten():
    callback = EarlyStopping(1, lambda step: True)
    assert not validate(callback, 10, -100)
    callback.start_over()
    assert not validate(callback, 20, -150)
    assert validate(callback, 30, -151)
