"""Every known key of DeepSpeed's JSON file, and the rule that applies to it.

Names and meanings are those of DeepSpeed's configuration reference and of its pydantic models (0.19).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron_zpp.config.legacy.reasons import CURRICULUM, EXPERTS, FEEDBACK
from megatron_zpp.config.options import flag_name

Settings = Mapping[str, Any]  # values by field path, such as {"zero.zero_stage": 3}
Kind = Literal["a whole number", "a number", "true or false", "text", "a list of two numbers"]


@dataclass(frozen=True)
class Obeyed:
    """A key that sets fields; `settings(value)` raises ValueError, saying what would be right."""

    flag: str
    kind: Kind
    settings: Callable[[Any], Settings]


@dataclass(frozen=True)
class Only:
    """A key that may only have `values`, which say what happens anyway; `otherwise`: what to do instead."""

    values: tuple[Any, ...]
    otherwise: str


@dataclass(frozen=True)
class Refused:
    """A key that would change the result; `null` counts as omitted; `otherwise`: what to do instead."""

    otherwise: str


class Off(Refused):
    """A block that is refused if its `enabled` is true."""


@dataclass(frozen=True)
class Idle:
    """A key that has no effect here, whatever its value."""

    why: str


Rule = Obeyed | Only | Off | Refused | Idle


def _sets(field_path: str, kind: Kind, flag: str = "") -> Obeyed:
    """A key that has the meaning of a field, and of its flag."""
    flag = flag or flag_name(field_path.partition(".")[2])
    return Obeyed(flag, kind, lambda value: {field_path: value})


_whole, _number = partial(_sets, kind="a whole number"), partial(_sets, kind="a number")
_switch = partial(_sets, kind="true or false")


def _hpz(size: int) -> Settings:
    if size < 0:
        raise ValueError("must be a number of ranks; 0 or 1: off")
    return {"zero.zero_hpz_partition_size": str(max(size, 1))}


def _initial_scale(power: int) -> Settings:
    if not 0 <= power <= 127:
        raise ValueError("must be a power of two from 0 to 127, which float32 can hold")
    return {"precision.initial_loss_scale": 2.0**power}


def _adamw(name: str) -> Settings:
    if name.lower() not in ("adam", "adamw", "fusedadam"):
        raise ValueError("must be AdamW; Adam is DeepSpeed's other name for it, and Muon is --optimizer muon")
    return {"optimizer.optimizer": "adam"}


def _offload(device: str) -> Settings:
    if device not in ("cpu", "none"):
        raise ValueError("must be cpu or none; states cannot be offloaded to disks")
    return {"zero.zero_offload_optimizer": device == "cpu"}


def _communication(dtype: str) -> Settings:
    if dtype.lower() not in ("fp32", "bf16"):
        raise ValueError(
            "must be fp32 or bf16; with fp16, gradients already travel as fp16 at stages 2 and 3"
        )
    return {"precision.grad_reduce_in_bf16": dtype.lower() == "bf16"}


def _batch(field_path: str, flag: str) -> Obeyed:
    def settings(size: int) -> Settings:
        if size < 1:
            raise ValueError("must be 1 or more")
        return {field_path: size} if field_path else {}

    return Obeyed(flag, "a whole number", settings)


ONLY_PRINTS = ("steps_per_print",)  # keys that are obeyed unless a flag says otherwise
BATCH_SIZE = "train_batch_size"
_FEW_BITS = "not supported: training of weights in few bits, or pruned"
_STATES = "not supported: master weights or moments below fp32"
_PARAMETERS = "not supported: parameters in CPU memory or on disks"
ACCUMULATION = "gradient_accumulation_steps"

_TOP: dict[str, Rule] = {
    BATCH_SIZE: _batch("training.global_batch_size", "--global-batch-size"),
    "train_micro_batch_size_per_gpu": _batch("training.micro_batch_size", "--micro-batch-size"),
    ACCUMULATION: _batch("", "--global-batch-size"),
    "steps_per_print": _whole("logging.log_interval"),
    "sequence_parallel_size": _whole("distributed.context_parallel_size"),
    "gradient_clipping": _number("optimizer.clip_grad"),
    "communication_data_type": Obeyed("--grad-reduce-in-bf16", "text", _communication),
    "gradient_allreduce_op": Only(("mean",), "not supported: sums of gradients over ranks"),
    "data_types.grad_accum_dtype": Only(("fp32",), "not supported: sums of gradients below fp32"),
    "scheduler": Refused(
        "DeepSpeed's schedules are one step behind; use --lr-decay-style constant for WarmupLR, linear for "
        "WarmupDecayLR or cosine for WarmupCosineLR, with --lr-warmup-iters and --lr-decay-iters"
    ),
}

_BLOCKS: dict[str, Rule] = {
    "csv_monitor": Off("use --metrics-file FILE, one JSON object per logged step"),
    "comet": Off("use --wandb-project, --tensorboard-dir or --metrics-file"),
    "trackio": Off("use --wandb-project, --tensorboard-dir or --metrics-file"),
    "amp": Off("use --bf16 or --fp16"),
    "torch_autocast": Off("use --bf16 or --fp16"),
    "data_efficiency.data_routing": Off("not supported: random layerwise token dropping"),
    "data_efficiency.data_sampling": Off(CURRICULUM),
    "curriculum_learning": Off(CURRICULUM),
    "progressive_layer_drop": Off("not supported: progressive layer dropping"),
    "eigenvalue": Off(_FEW_BITS),
    "elasticity": Off(
        "any number of ranks can resume from a checkpoint; give the batch size with --global-batch-size"
    ),
    "autotuning": Off("not supported: autotuning; --dry-run compares settings"),
    "hybrid_engine": Off("not supported: reinforcement learning and instruction tuning"),
    "expert_parallel": Off(EXPERTS),
    "nebula": Off("checkpoints go to --save; --async-save writes them in the background"),
    "datastates_ckpt": Off("checkpoints go to --save; --async-save writes them in the background"),
    "sparse_attention": Refused("not supported: sparse attention"),
    "compression_training": Refused(_FEW_BITS),
    "quantize_training": Refused(_FEW_BITS),
    "tensor_parallel.autotp_size": Only((0, 1), "use --tensor-model-parallel-size"),
    "checkpoint.use_node_local_storage": Only((False,), "not supported: checkpoints on disks of nodes"),
}

_REPORTS: dict[str, Rule] = {
    "tensorboard.enabled": Obeyed("--tensorboard-dir", "true or false", lambda on: {}),
    "tensorboard.output_path": Obeyed("--tensorboard-dir", "text", lambda text: {}),
    "tensorboard.job_name": Obeyed("--tensorboard-dir", "text", lambda text: {}),
    "wandb.enabled": Obeyed("--wandb-project", "true or false", lambda on: {}),
    "wandb.project": Obeyed("--wandb-project", "text", lambda text: {}),
    "wandb.team": _sets("logging.wandb_entity", "text"),
}

_OPTIMIZER: dict[str, Rule] = {
    "optimizer.type": Obeyed("--optimizer adam", "text", _adamw),
    "optimizer.params.lr": _number("learning_rate.lr"),
    "optimizer.params.betas": Obeyed(
        "--adam-beta1 --adam-beta2",
        "a list of two numbers",
        lambda betas: {"optimizer.adam_beta1": betas[0], "optimizer.adam_beta2": betas[1]},
    ),
    "optimizer.params.eps": _number("optimizer.adam_eps"),
    "optimizer.params.weight_decay": _number("optimizer.weight_decay"),
    "optimizer.params.adam_w_mode": Only((True,), "not supported: Adam with L2 regularisation"),
    "optimizer.params.bias_correction": Only((True,), "not supported: AdamW without bias correction"),
    "optimizer.params.amsgrad": Only((False,), "not supported: AMSGrad"),
    "optimizer.params.max_grad_norm": Refused("use gradient_clipping or --clip-grad"),
    "optimizer.params.momentum": Refused("use --optimizer muon with --muon-momentum"),
    "optimizer.params.muon_lr": Refused("use --optimizer muon with --lr"),
    "optimizer.params.adam_lr": Refused("use --optimizer muon with --decoupled-lr"),
}

_PRECISION: dict[str, Rule] = {
    "fp16.enabled": _switch("precision.fp16", flag="--fp16; false without another format is --fp32"),
    "fp16.loss_scale": Obeyed(
        "--loss-scale; 0 is dynamic", "a number", lambda scale: {"precision.loss_scale": scale or None}
    ),
    "fp16.initial_scale_power": Obeyed("--initial-loss-scale", "a whole number", _initial_scale),
    "fp16.loss_scale_window": _whole("precision.loss_scale_window"),
    "fp16.hysteresis": _whole("precision.hysteresis"),
    "fp16.min_loss_scale": _number("precision.min_loss_scale"),
    "fp16.consecutive_hysteresis": Only((False,), "not supported: hysteresis over steps in a row"),
    "fp16.fp16_master_weights_and_grads": Only((False,), _STATES),
    "bf16.enabled": _switch("precision.bf16", flag="--bf16; false without another format is --fp32"),
    "bf16.bf16_master_weights_and_grads": Only((False,), _STATES),
    "bf16.bf16_optimizer_states": Only((False,), _STATES),
}

_ZERO: dict[str, Rule] = {
    "stage": _whole("zero.zero_stage"),
    "zero_quantized_weights": _switch("zero.zero_quantized_weights"),
    "zero_hpz_partition_size": Obeyed("--zero-hpz-partition-size", "a whole number", _hpz),
    "zero_quantized_gradients": _switch("zero.zero_quantized_gradients"),
    "offload_optimizer.device": Obeyed("--zero-offload-optimizer", "text", _offload),
    "cpu_offload": _switch("zero.zero_offload_optimizer"),
    "offload_param.device": Only(("none",), _PARAMETERS),
    "cpu_offload_param": Only((False,), _PARAMETERS),
    "zeropp_loco_param": Refused(FEEDBACK),
    "mics_shard_size": Only(
        (-1,), "use zero_hpz_partition_size, which also keeps weights in groups of ranks"
    ),
    "zenflow": Refused("not supported: ZenFlow"),
    "load_from_fp32_weights": Only((True,), "not supported: weights from checkpoints below fp32"),
}

_IDLE = {  # with zero. for zero_optimization.
    "gradients are dense, divided by the ranks and accumulated in flat buffers": """prescale_gradients
        gradient_predivide_factor sparse_gradients zero.contiguous_gradients""",
    "--optimizer names the optimizer, and --fused-backend selects AdamW's implementation": """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.params.torch_adam""",
    "micro-batches are counted here, and every batch is whole": """managed_gradient_accumulation
        dataloader_drop_last""",
    "there is no pipeline, context or expert parallelism": """seq_parallel_comm_data_type
        use_data_before_expert_parallelism pipeline""",
    "there is only one implementation": """disable_allgather optimizer.legacy_fusion fp16.fused_mode
        bf16.immediate_grad_update zero.allgather_partitions zero.use_multi_rank_bucket_allreduce
        zero.round_robin_gradients zero.stage3_use_all_reduce_for_fetch_params
        zero.stage3_allgather_sequential zero.legacy_stage1 zero.stage3_partition_stream_chunk_size
        zero.memory_efficient_linear zero.override_module_apply zero.parameter_alignment
        zero.pipeline_loading_checkpoint zero.leaf_module zero.save_muon_momentum_buffer_in_memory
        zero.compute_grad_norm zero.elastic_checkpoint zero.offload_optimizer.convert_grad_on_cpu
        zero.offload_optimizer.cpuadam_cores_perc activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.synchronize_checkpoint_boundary""",
    "inputs are token ids of the tokenizer": "vocabulary_size fp16.auto_cast",
    "only prints; the log has throughput, MFU and bytes": """wall_clock_breakdown memory_breakdown dump_state
        log_level timers comms_logger flops_profiler zero.log_trace_cache_warnings
        zero.enable_sanity_checks activation_checkpointing.profile""",
    "affects speed only": "graph_harvesting compile",
    "all of the optimizer's states are offloaded in one way, and pinned, not to disks": """aio
        zero.offload_optimizer.ratio zero.offload_optimizer.super_offload zero.cpu_offload_use_pin_memory
        zero.offload_optimizer.pin_memory zero.offload_optimizer.nvme_path
        zero.offload_optimizer.buffer_count zero.offload_optimizer.fast_init
        zero.offload_optimizer.pipeline_read zero.offload_optimizer.pipeline_write""",
    "every rank writes its own shards, which load at any number of ranks": """checkpoint.load_universal
        checkpoint.tag_validation checkpoint.parallel_write
        zero.stage3_gather_16bit_weights_on_model_save zero.stage3_gather_fp16_weights_on_model_save""",
    "its parts decide": "data_efficiency.enabled data_efficiency.seed",
    "it is misspelt, and DeepSpeed ignores it": "zero.stage3_param_persitence_threshold",
    "every parameter is used and trained": """zero.zero_quantized_nontrainable_weights
        zero.ignore_unused_parameters""",
    "mics_shard_size is off": "zero.mics_hierarchical_params_gather",
    "gathers and reductions always overlap with computation": "zero.overlap_comm",
    "every rank receives only its shard": "zero.reduce_scatter",
    "buffers hold one unit, such as a layer, which is gathered as a whole": """zero.reduce_bucket_size
        zero.allgather_bucket_size zero.sub_group_size zero.stage3_max_live_parameters
        zero.stage3_max_reuse_distance zero.stage3_param_persistence_threshold
        zero.stage3_model_persistence_threshold zero.stage3_module_granularity_threshold""",
    "--zero-prefetch-units sets how far gathers run ahead": "zero.stage3_prefetch_bucket_size",
    "parameters stay on the GPU": """zero.offload_param.pin_memory zero.offload_param.nvme_path
        zero.offload_param.buffer_count zero.offload_param.buffer_size zero.offload_param.max_in_cpu""",
    "with tensor parallelism, what recomputation starts from is always split over tensor ranks": """
        activation_checkpointing.partition_activations""",
    "--recompute-num-layers sets the layers per activation checkpoint": """
        activation_checkpointing.number_checkpoints""",
    "--wandb-exp-name distinguishes runs": "wandb.group",
    "--tensor-model-parallel-size sets tensor parallelism, with one implementation": """
        tensor_parallel.preset_model tensor_parallel.vocab_parallel_lm_head
        tensor_parallel.partition_config tensor_parallel.tp_overlap_comm""",
}

KEYS: Mapping[str, Rule] = {
    **_TOP,
    **_OPTIMIZER,
    **_PRECISION,
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO.items()},
    "activation_checkpointing.cpu_checkpointing": _switch("recompute.recompute_offload"),
    **_REPORTS,
    **_BLOCKS,
    **{
        re.sub(r"^zero\.", "zero_optimization.", key): Idle(why)
        for why, keys in _IDLE.items()
        for key in keys.split()
    },
}
