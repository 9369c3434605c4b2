"""pretrain_gpt.py with the compiler's kernels in place of some of ours, for throughput.py.

python benchmarks/compiler_kernels.py rotary,swiglu FLAGS OF pretrain_gpt.py

The first argument names what of compiled layers is left to torch.compile: rotary, swiglu, or both.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from megatron_zpp.model.fused.blocks import FusedKernels
from megatron_zpp.model.layer import Layer
from pretrain_gpt import main

SWITCHES = {"rotary": "_rotates", "swiglu": "_swiglu"}


def leave_to_compiler(parts: list[str]) -> None:
    """Let layers that are compiled from now on do without our kernels for `parts`."""
    initialise = FusedKernels.__init__

    def without(self: FusedKernels, layer: Layer) -> None:
        initialise(self, layer)
        for part in parts:
            setattr(self, SWITCHES[part], False)

    FusedKernels.__init__ = without  # type: ignore[method-assign]


if __name__ == "__main__":
    leave_to_compiler(sys.argv.pop(1).split(","))
    main()
