"""A program of its own: megatron-core's models on CPU ranks save checkpoints and their logits.

python megatron_program.py DIRECTORY

For one tensor rank and for two, DIRECTORY/RANKS has a directory for each family: `dist` is a torch_dist
checkpoint of Megatron-LM's, `ranks` one of the old layout, and logits.safetensors has tokens and what the
model makes of them. Ranks are forked, since megatron-core takes long to import.
"""

import argparse
import contextlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, ITERATION = 2, 64, 4, 32, 90, 7
FAMILIES = ("gpt", "llama")
PADDED = 128  # a multiple of --make-vocab-size-divisible-by 32 times 2 tensor ranks, and of 32


def settings(family: str, ranks: int) -> argparse.Namespace:
    """What Megatron-LM's args say of the model."""
    llama = family == "llama"
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        kv_channels=WIDTH // HEADS,
        ffn_hidden_size=160 if llama else 4 * WIDTH,
        group_query_attention=llama,
        num_query_groups=2 if llama else 1,
        max_position_embeddings=LENGTH,
        seq_length=LENGTH,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=10000,
        rotary_percent=1.0,
        normalization="RMSNorm" if llama else "LayerNorm",
        norm_epsilon=1e-5,
        swiglu=llama,
        squared_relu=False,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        qk_layernorm=False,
        softmax_type="learnable" if llama else "vanilla",
        untie_embeddings_and_output_weights=llama,
        make_vocab_size_divisible_by=32,
        padded_vocab_size=PADDED,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=1,
        params_dtype=torch.float32,
        num_experts=None,
        iteration=ITERATION,
        data_path=["corpus"],
    )


def build(args: argparse.Namespace) -> torch.nn.Module:
    """megatron-core's GPTModel of its local specification, with weights that are unlike any default."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else lambda x: F.gelu(x, approximate="tanh"),
        add_bias_linear=args.add_bias_linear,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        softmax_type=args.softmax_type,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    torch.manual_seed(3)  # the same on all ranks: the whole matrices are drawn, and cut
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "offset")) or "norm" in name:
                shared = name.endswith(("linear_qkv.bias", "linear_fc1.bias", "offset"))
                seed = 100 + len(name) + (dist.get_rank() if shared else 0)
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def main() -> None:
    """See the file."""
    torch.cuda.current_device = lambda: "cpu"  # megatron-core asks for it wherever it runs
    torch.cuda.synchronize = lambda *_: None
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # there is no dropout
    filesystem_async._process_memory = lambda: 0  # would need psutil
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(ranks, rank)) for ranks in (1, 2) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(any(process.exitcode for process in started))


def run(ranks: int, rank: int) -> None:
    """One of so many tensor ranks."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron's own would be a process of a server that imports torch again.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    root = Path(sys.argv[1]) / f"{ranks}"
    root.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(ranks, 1)
    for family in FAMILIES:
        save(root / family, settings(family, ranks), rank)
    dist.destroy_process_group()


def save(root: Path, args: argparse.Namespace, rank: int) -> None:
    """Write both checkpoints and the logits of a model."""
    from megatron.core import dist_checkpointing

    model = build(args)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.inference_mode():
        logits = model(tokens, positions, mask)
    common: dict[str, Any] = {"args": args, "iteration": ITERATION, "checkpoint_version": 3.0}
    name = f"iter_{ITERATION:07d}"
    old = root / "ranks" / name / f"mp_rank_{rank:02d}"
    old.mkdir(parents=True)
    state = dict(model.state_dict())
    torch.save(common | {"model": state, "rng_state": [{"random": ("state", 1)}]}, old / "model_optim_rng.pt")
    new = root / "dist" / name
    new.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(common | {"model": model.sharded_state_dict(prefix="")}, str(new))
    if rank == 0:
        for folder in ("ranks", "dist"):
            (root / folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        save_file(
            {"tokens": tokens, "logits": logits[..., :VOCABULARY].contiguous()}, root / "logits.safetensors"
        )
    dist.barrier()


if __name__ == "__main__":
    main()
