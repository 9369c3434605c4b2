"""Python imports this from PYTHONPATH as it starts: ranks then wait in a step, so no machine is too fast.

While the file HOLD is there, a rank that has begun HOLD_AFTER micro-batches waits in the last one.
"""

import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_ENGINE = "megatron_zpp.zero.engine"


class _HoldingEngine:
    """Finds the engine, and changes it as it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _ENGINE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def load_and_change(module: object) -> None:
            load(module)
            hold(module.ZeroEngine, Path(os.environ["HOLD"]), int(os.environ["HOLD_AFTER"]))

        spec.loader.exec_module = load_and_change
        return spec


def hold(engine_type: type, file: Path, after: int) -> None:
    """The losses of training wait, from the one that `after` says."""
    loss, begun = engine_type._loss, 0

    def waiting(engine: object, batch: object) -> object:
        nonlocal begun
        begun += engine.model.training
        while begun >= after and file.exists():
            time.sleep(0.01)
        return loss(engine, batch)

    engine_type._loss = waiting


sys.meta_path.insert(0, _HoldingEngine())
