"""GPT pretraining with a built-in ZeRO++ layer. README.md is the map, docs/guide/python_api.md the API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_zpp.version import __version__ as __version__

if TYPE_CHECKING:
    from megatron_zpp.api.engine import ZeroEngine as ZeroEngine
    from megatron_zpp.config.engine import EngineConfig as EngineConfig
    from megatron_zpp.config.model import ModelConfig as ModelConfig
    from megatron_zpp.config.optimizer import OptimizerConfig as OptimizerConfig
    from megatron_zpp.config.optimizer import PrecisionConfig as PrecisionConfig
    from megatron_zpp.config.zero import ZeroConfig as ZeroConfig
    from megatron_zpp.data.batches import BatchSchedule as BatchSchedule
    from megatron_zpp.data.loader import MicroBatches as MicroBatches
    from megatron_zpp.distributed.topology import Topology as Topology
    from megatron_zpp.mesh import Mesh as Mesh
    from megatron_zpp.model.gpt import GPT as GPT
    from megatron_zpp.ops.library import load_operations as load_operations
    from megatron_zpp.placement import Split as Split
    from megatron_zpp.train.schedule.learning_rate import LearningRate as LearningRate
    from megatron_zpp.zero.engine import StepResult as StepResult
    from megatron_zpp.zero.optimizer import ShardSegment as ShardSegment
    from megatron_zpp.zero.optimizer import UpdateRule as UpdateRule

_MODULES = {
    "GPT": "model.gpt",
    "BatchSchedule": "data.batches",
    "EngineConfig": "config.engine",
    "LearningRate": "train.schedule.learning_rate",
    "Mesh": "mesh",
    "MicroBatches": "data.loader",
    "ModelConfig": "config.model",
    "OptimizerConfig": "config.optimizer",
    "PrecisionConfig": "config.optimizer",
    "ShardSegment": "zero.optimizer",
    "Split": "placement",
    "StepResult": "zero.engine",
    "Topology": "distributed.topology",
    "UpdateRule": "zero.optimizer",
    "ZeroConfig": "config.zero",
    "ZeroEngine": "api.engine",
    "load_operations": "ops.library",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used: most programs need no torch to check their flags."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megatron_zpp' has no attribute {name!r}")
    return getattr(import_module(f"megatron_zpp.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The names of the API."""
    return sorted([*__all__, "__version__"])
