"""RunConfig: everything that determines a run, as one frozen value."""

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.algorithm import AlgorithmSettings, GrpoSettings
from tidemill.config.base import Settings
from tidemill.config.checkpoint import CheckpointSettings
from tidemill.config.cluster import ClusterSettings, InlineClusterSettings
from tidemill.config.data import DataSettings
from tidemill.config.engine import EngineSettings, TransformersEngineSettings
from tidemill.config.environment import EnvironmentSettings, SingleTurnSettings
from tidemill.config.eval import EvalSettings
from tidemill.config.kinds import AbsolutePath, Count, Label
from tidemill.config.recorder import RecorderSettings
from tidemill.config.registry import Plugged
from tidemill.config.residency import ResidencySettings
from tidemill.config.reward import ExactMatchSettings, RewardSettings
from tidemill.config.rollout import RolloutSettings
from tidemill.config.trainer import FsdpTrainerSettings, TrainerSettings
from tidemill.config.warm_up import WarmUpSettings
from tidemill.config.weights import WeightsSettings

__all__ = ["RunConfig", "RunSettings"]


class RunSettings(Settings):
    """The run itself."""

    dir: Annotated[AbsolutePath, Field(examples=["runs/first"])]
    """The run folder: everything of a run is written there, and a run is resumed from there."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Determines the order of prompts and every random draw."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` is the GPU when there is one."""
    threads: Annotated[int, Field(ge=0), Label("threads, 0 for automatic")] = 0
    """Threads that PyTorch computes with on the CPU, in each process; 0 leaves the choice to PyTorch, and divides the
    cores among the processes of a host where there are several."""


class RunConfig(Settings):
    """What was asked for. Equal configs are the same experiment."""

    model: Annotated[AbsolutePath, Field(examples=["models/base"])]
    """Folder of the model to train, in the Hugging Face layout, with its tokenizer."""
    steps: Annotated[Count, Field(examples=[300])]
    """Steps of the whole run, supervised ones included. A finished run goes on when this is raised."""
    run: RunSettings
    """The run itself: its folder, seed and device."""
    trainer: Annotated[TrainerSettings, Plugged("trainer")] = FsdpTrainerSettings()
    """Who owns parameters and optimizer, and how one update is made."""
    warm_up: WarmUpSettings = WarmUpSettings()
    """Supervised steps before the first rollout; reinforcement then starts with a fresh optimizer."""
    engine: Annotated[EngineSettings, Plugged("engine")] = TransformersEngineSettings()
    """Who turns prompts into answers."""
    weights: WeightsSettings = WeightsSettings()
    """How the hand-over of weights from trainer to engine is checked."""
    residency: ResidencySettings = ResidencySettings()
    """The byte budget that decides who sleeps; trainer and engine stay awake together when both fit."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saving, resuming and exporting. The state at the end, and when a signal stops the run, is always saved."""
    eval: EvalSettings = EvalSettings()
    """Evaluation on held-out prompts. With `eval.data` set, the end of the run is evaluated too."""
    rollout: RolloutSettings = RolloutSettings()
    """Prompts and answers of one step, and how they are sampled."""
    algorithm: Annotated[AlgorithmSettings, Plugged("algorithm")] = GrpoSettings()
    """What to learn from the answers of a step."""
    data: Annotated[DataSettings, Plugged("data")]
    """Where prompts come from, and how they become tokens."""
    reward: Annotated[RewardSettings, Plugged("reward")] = ExactMatchSettings()
    """What an answer is worth."""
    environment: Annotated[EnvironmentSettings, Plugged("environment")] = SingleTurnSettings()
    """How an episode is played."""
    cluster: Annotated[ClusterSettings, Plugged("cluster")] = InlineClusterSettings()
    """Where the run's processes live."""
    recorder: RecorderSettings = RecorderSettings()
    """Where what happens is shown and kept, besides the JSONL files, which are always written."""
