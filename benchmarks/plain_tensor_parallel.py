"""GPT-2 with torch's own tensor parallelism, as users set it up: DTensor, sequence and loss parallel.

The plan is that of torch's tutorial on tensor parallelism and of torchtitan: parameters are fp32 and the
compute is bf16 by autocast, norms and residuals are sequence parallel, the loss is computed from parts of the
vocabulary, and the output weight is not tied, as a plan cannot give one parameter to two modules. The
asynchronous form fuses all-gathers and reduce-scatters with products, through symmetric memory.

Shapes: T ranks, B batch, S tokens, D width, H heads, V entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.plain_models import Block, PlainGPT
from megatron_zpp.config.model import ModelConfig


class TensorParallelBlock(Block):
    """A pre-LN layer without dropout, whose heads are beside each other in the rows of `qkv`."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S / T, D) -> the same; products with the weights gather and scatter the tokens."""
        head_width = self.out.in_features // self.heads
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, head_width))  # (B, S, H / T, 3, D / H)
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TensorParallelGPT(PlainGPT):
    """GPT-2 on the ranks of a mesh; every rank gives it the same tokens."""

    block = TensorParallelBlock

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__(config, vocabulary)
        self.output = nn.Linear(config.hidden_size, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, S) twice -> the mean cross-entropy, whose backward runs here too: loss parallel needs that."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        with loss_parallel():
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.detach()


def parallelize(model: TensorParallelGPT, mesh: DeviceMesh, *, asynchronous: bool, compiles: bool) -> None:
    """Split the model over the mesh, and compile its layers.

    `asynchronous`: torch fuses collectives with the products beside them.
    """
    if asynchronous:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    tables = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(
        model,
        mesh,
        {
            "tokens": tables,
            "positions": tables,
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(use_local_output=True),
                "qkv": ColwiseParallel(input_layouts=Shard(1)),
                "out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        if compiles:
            block.compile(dynamic=False)
