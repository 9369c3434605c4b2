"""In which formats the kernels of a layer are tested as they are, and in which inside a graph."""

import pytest
import torch

# (dtype, compiles); a graph is compiled anew for each format and size
FORMATS = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    pytest.param(torch.float32, True, marks=pytest.mark.gpu_long),
    pytest.param(torch.float16, True, marks=pytest.mark.gpu_long),
]
