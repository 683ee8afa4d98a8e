"""Every error that Tidemill raises on purpose, one tree; and beside it the stops that a user asks for, which are none.

Each takes one message and pickles. The message says what could not be done, the values that matter and why, and what
to do: lower case, no full stop, names as the user writes them. `exit_code` is what the command line ends with.
"""

__all__ = [
    "CheckpointError",
    "CheckpointRefused",
    "ClusterError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EnvironmentFailure",
    "Interrupted",
    "PluginError",
    "RankMissingError",
    "RecorderError",
    "ResidencyError",
    "RewardError",
    "RunLockedError",
    "Terminated",
    "TidemillError",
    "TrainerError",
    "WeightSyncError",
    "WorkerDiedError",
    "WorkerError",
]


class TidemillError(Exception):
    """Root of the tree; catching it catches every error that we raise on purpose and nothing else."""

    exit_code = 1


class ConfigError(TidemillError, ValueError):
    """The settings, or the files that they name, cannot make a run; found before anything is started."""

    exit_code = 2


class DataError(ConfigError):
    """A prompt file, model folder or tokenizer cannot be used as it is."""


class PluginError(ConfigError, ImportError):
    """A plug-in, or the library that it needs, is not there; the message holds the install command."""


class RunLockedError(ConfigError):
    """Another process holds the run folder."""


class ClusterError(ConfigError):
    """The machines, GPUs or processes asked for cannot be had."""


class ResidencyError(TidemillError):
    """Device memory was asked for that cannot be had, or used without a lease."""


class CheckpointError(TidemillError):
    """A checkpoint could not be written, or cannot be trusted."""


class CheckpointRefused(CheckpointError):
    """What was asked for does not fit what is there; nothing was started and nothing is changed."""

    exit_code = 2


class WeightSyncError(TidemillError):
    """The engine does not hold the trainer's weights; it refuses to generate until a whole sync succeeds."""


class RecorderError(TidemillError):
    """A file that the run promises to keep, its numbers or rollouts, could not be written."""


class TrainerError(TidemillError):
    """The trainer cannot go on."""


class EngineError(TidemillError):
    """The engine cannot generate."""


class EnvironmentFailure(TidemillError):
    """Too many episodes failed to call the rest a batch."""


class RewardError(TidemillError):
    """Too many rewards failed to call the rest a batch, or the reward function does not keep its contract."""


class WorkerError(TidemillError):
    """A worker process failed, died or did not answer, and the run cannot go on without it."""


class RankMissingError(WorkerError, ResidencyError):
    """A rank waited in vain for others, which are dead or busy with something else; it is not the one to blame."""


class WorkerDiedError(WorkerError):
    """A worker process is gone: killed, out of memory, or crashed without a word."""


class Interrupted(BaseException):
    """Ctrl-C asked the run to stop; nothing that was acknowledged is lost.

    No Exception, as KeyboardInterrupt is none: it is raised in the middle of environments, rewards and recorders that
    others wrote, and their `except Exception` must not take it for a failure of theirs.
    """

    exit_code = 130


class Terminated(Interrupted):
    """As Interrupted, by SIGTERM."""

    exit_code = 143
