"""A trainer of somebody else's."""

from tidemill.config.trainer import TrainerSettings


class Trainer(TrainerSettings):
    """Nobody knows what it takes."""

    implementation = "tests.planning.plugged:Trainer"
