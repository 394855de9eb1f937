"""The clock of a step's stages: each moment belongs to one stage, the innermost, and together they are all the time there was."""

import pytest

from seqvae.profiling.measured_run import STAGES, StageClock, stage_of


class Seconds:
    """A clock that goes on only by `pass_by`."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def pass_by(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def clock(seconds) -> StageClock:
    return StageClock(now=seconds)


def spent(clock: StageClock) -> dict[str, float]:
    """Return the seconds of the stages in which any time was spent."""
    return {stage: seconds for stage, seconds in clock.seconds().items() if seconds}


def test_a_stage_within_another_is_not_counted_twice(clock, seconds):
    with clock.profile("optimizer_step"):
        seconds.pass_by(1)
        with clock.profile("[Strategy]SingleDeviceStrategy.training_step"):
            seconds.pass_by(2)
        with clock.profile("[Strategy]SingleDeviceStrategy.backward"):
            seconds.pass_by(4)
        seconds.pass_by(8)
    assert spent(clock) == {"optimizer": 9, "forward": 2, "backward": 4}


def test_what_has_no_stage_counts_for_the_one_around_it(clock, seconds):
    with clock.profile("run_training_batch"):
        seconds.pass_by(1)
        with clock.profile("[LightningModule]TrainingModule.optimizer_step"):
            seconds.pass_by(2)
            with clock.profile("[LightningModule]TrainingModule.on_before_zero_grad"):
                seconds.pass_by(4)
    assert spent(clock) == {"loop": 1, "optimizer": 6}


def test_time_between_actions_is_the_loops(clock, seconds):
    seconds.pass_by(1)
    with clock.profile("[_TrainingEpochLoop].train_dataloader_next"):
        seconds.pass_by(2)
    seconds.pass_by(4)
    assert spent(clock) == {"loop": 5, "data": 2}


def test_callbacks_are_monitoring_but_for_what_they_write_into_a_checkpoint(clock, seconds):
    with clock.profile("[Callback]Progress.on_train_batch_end"):
        seconds.pass_by(1)
    with clock.profile("[Callback]Checkpoints.on_save_checkpoint"):
        seconds.pass_by(2)
    assert spent(clock) == {"monitoring": 1, "checkpoint": 2}


def test_a_restart_forgets_what_was_and_goes_on_within_the_stage_that_is_under_way(clock, seconds):
    with clock.profile("[Callback]Baton.on_train_batch_end"):
        seconds.pass_by(1)
        clock.restart()
        seconds.pass_by(2)
    seconds.pass_by(4)
    assert spent(clock) == {"monitoring": 2, "loop": 4}


def test_stages_add_up_to_the_time_that_went_by_even_where_one_is_under_way(clock, seconds):
    seconds.pass_by(1)
    with clock.profile("backward"):
        seconds.pass_by(2)
        with clock.profile("batch_to_device"):
            seconds.pass_by(4)
            assert sum(clock.seconds().values()) == 7
    assert tuple(clock.seconds()) == STAGES


class Device:
    """A device that works on until all requested work is done, which `wait` waits for."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds, self.work, self.times_waited_for = seconds, 0.0, 0

    def wait(self) -> None:
        self.times_waited_for += 1
        self.seconds.pass_by(self.work)
        self.work = 0.0


def test_work_of_a_device_counts_for_the_stage_that_requested_it(seconds):
    device = Device(seconds)
    clock = StageClock(device.wait, now=seconds)
    with clock.profile("backward"):
        device.work += 5
    with clock.profile("optimizer_step"):
        device.work += 2
    assert spent(clock) == {"backward": 5, "optimizer": 2}


def test_there_is_no_wait_for_the_device_if_the_stage_stays_the_same(seconds):
    device = Device(seconds)
    clock = StageClock(device.wait, now=seconds)
    with clock.profile("run_training_batch"), clock.profile("on_train_batch_start"):
        pass
    assert device.times_waited_for == 0


@pytest.mark.parametrize(
    ("action", "stage"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data"),
        ("[Strategy]SingleDeviceStrategy.batch_to_device", "transfer"),
        ("[LightningDataModule]SequenceDataModule.transfer_batch_to_device", "transfer"),
        ("[LightningModule]TrainingModule.configure_gradient_clipping", "optimizer"),
        ("[LightningModule]TrainingModule.optimizer_zero_grad", "optimizer"),
        ("save_checkpoint", "checkpoint"),
        ("run_training_epoch", None),
    ],
)
def test_lightnings_names_are_understood(action, stage):
    assert stage_of(action) == stage
