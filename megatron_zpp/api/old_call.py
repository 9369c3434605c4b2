"""The call of ZeroEngine in version 0.1, which works for one minor version more."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.distributed.topology import Topology

Parameters = ParamSpec("Parameters")


def accepts_old_call(construct: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let a constructor of (model, mesh, config, initialize=…) take (model, initialize, zero=…, …) too."""

    @functools.wraps(construct)
    def either(*arguments: Any, **settings: Any) -> None:
        if "zero" in settings:
            warnings.warn(
                "ZeroEngine(model, initialize, zero=…, topology=…, …) ends with the next minor version; "
                "call ZeroEngine(model, mesh, EngineConfig(zero=…, …), initialize=…)",
                DeprecationWarning,
                stacklevel=2,
            )
            engine, model, *rest = arguments
            settings["initialize"] = rest[0] if rest else settings["initialize"]
            parts = {name: settings.pop(name) for name in ("zero", "optimizer", "precision")}
            topology: Topology = settings.pop("topology")
            arguments = (engine, model, topology.mesh(), EngineConfig(**parts))
        construct(*arguments, **settings)

    return either
