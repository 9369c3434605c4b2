"""Builds the model with its initial weights, sharded over the ranks."""

import os
from dataclasses import replace
from functools import partial

import torch

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.build import build_model, exchanges_of, norm_classes
from megatron_zpp.model.matmuls import PLAIN_MATMULS, Matmuls
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.train.setup.device import Device, check_attention
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.sections import Sections
from megatron_zpp.zero.tensor_parallel import TensorShare

# Parameters of GPT that --decoupled-lr is for, as in Megatron-LM.
DECOUPLED = ("embedding.tokens.weight", "head.output.weight")


def build_engine(config: Config, vocab_size: int, device: Device, topology: Topology) -> ZeroEngine:
    """The engine with initial weights; all ranks of the job have joined and must call it.

    Raises ValueError if the chosen attention kernel does not run on the device.
    """
    if device.compiles or device.attention.compiled:
        from megatron_zpp.train.setup.compiling import prepare_compiler

        prepare_compiler(topology, os.environ)
    check_attention(config, device)
    group, overlapped = None, False
    distributed, context = config.distributed, None
    mesh = topology.mesh(distributed.tensor_model_parallel_size, distributed.context_parallel_size)
    if mesh.tensor_ranks > 1:
        group = TensorGroup(mesh.ranks(mesh.tensor), mesh.rank, distributed.timeout)
        overlapped = _overlaps(config, device, group)
    if mesh.context_ranks > 1:
        context = TensorGroup(mesh.ranks(mesh.context), mesh.rank, distributed.timeout)
    matmuls = _matmuls(config.precision, device.device)
    with torch.device("meta"):
        model = build_model(
            config.model,
            vocab_size,
            config.recompute,
            device.attention,
            cut_layers=config.zero.cuts_layers,
            norms=norm_classes(device.fused_backend),
            matmuls=matmuls,
            group=group,
            overlapped=overlapped,
            context=context,
            comm_type=distributed.cp_comm_type,
        )
    model.head.objective = model.head.objective._replace(z_coeff=config.training.z_loss_coeff)
    scaling = matmuls.scaling(model)
    codes = matmuls.weight_codes(scaling)
    if device.compiles:
        from megatron_zpp.train.setup.compiling import compile_parts

        compile_parts(
            model,
            (config.training.micro_batch_size, config.model.seq_length),
            device.say,
            masked=config.data.reset_attention_mask,
            on_gpu=device.device.type == "cuda",
            matmuls=matmuls,
            ready=(lambda: True) if scaling is None else (lambda: scaling.known),
        )
    share = TensorShare(exchanges=exchanges_of(model))
    if group is not None:
        from megatron_zpp.model.parallel.layers import splits_of

        share = replace(share, group=group, splits=splits_of(model.units()))
    matrices, decoupled = trained_matrices(config.model, config.optimizer), set[str]()
    if config.learning_rate.decoupled_lr is not None:
        parameters = ((unit, path) for unit, module in model.units() for path, _ in module.named_parameters())
        others = {f"{unit}.{path}" for unit, path in parameters} - matrices.keys()
        decoupled = others if matrices else set(decoupled_of(config.model))
    return ZeroEngine(
        model,
        mesh,
        EngineConfig(zero=config.zero, optimizer=config.optimizer, precision=config.precision),
        initialize=partial(model.initialize_parameter, seed=config.training.seed),
        device=device.device,
        share=share,
        fused_backend=device.fused_backend,
        operations=device.operations,
        timeout=config.distributed.timeout,
        sections=Sections(device.device if config.timing.level else None),
        say=device.say,
        decoupled=decoupled,
        rate_factors=model.rate_factors(),
        matrices=matrices,
        scaling=scaling,
        codes=codes,
    )


def decoupled_of(model: ModelConfig) -> tuple[str, ...]:
    """The parameters with a learning rate of their own. Tied output weights are the table of tokens."""
    return DECOUPLED if model.untie_embeddings_and_output_weights else DECOUPLED[:1]


def _overlaps(config: Config, device: Device, group: TensorGroup) -> bool:
    """Whether tensor ranks compute beside exchanges, and what their GPUs copy to has been allocated.

    Not with --fp8, whose products take the tokens of all ranks at once. Raises ValueError if copies fail.
    """
    place = device.device
    if place.type != "cuda" or config.precision.fp8:
        return False
    from megatron_zpp.distributed.peer_rows import allocate, can_copy

    if not can_copy(group, place):
        device.say(
            " tensor ranks exchange activations by NCCL and wait for them: copies beside matmuls need GPUs "
            "that can write to each other's memory, as with NVLink"
        )
        return False
    rows = config.training.micro_batch_size * config.model.seq_length // group.size
    rows //= config.distributed.context_parallel_size
    dtype = getattr(torch, config.precision.compute_dtype("cuda"))
    try:
        allocate(group, rows, config.model.hidden_size, dtype, place)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        fix = f"copies between GPUs fail here; use 1 ({' '.join(str(error).split())})"
        raise option_error("--tensor-model-parallel-size", group.size, fix) from None
    return True


def _matmuls(precision: PrecisionConfig, device: torch.device) -> Matmuls:
    """What computes the products of a run; a run without --fp8 imports nothing of model/fp8/."""
    if not precision.fp8:
        return PLAIN_MATMULS
    from megatron_zpp.model.fp8.matmuls import DelayedMatmuls, TensorwiseMatmuls

    return DelayedMatmuls(precision, device) if precision.fp8_delayed else TensorwiseMatmuls()
