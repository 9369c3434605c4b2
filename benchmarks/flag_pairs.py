"""Which pairs of engine flags run together, and why the others do not: two steps each, on CPUs over gloo.

python benchmarks/flag_pairs.py                     # all pairs, to results/flag_pairs.json
python benchmarks/flag_pairs.py --only decoupled    # pairs that have a setting with this in its name

Builds the engine as pretrain_gpt.py does, on 2 nodes of 2 ranks, or on nodes of 4 where a setting is about a
part of a node. A setting brings the flags that it needs, unless the other one has them. A pair is refused if
an error ends it that names a flag; every other error is a failure, and so is a loss that is not finite. Exit
status 1 if a pair fails.
"""

import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, program_parser, save_result
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.train.inputs import check_inputs
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from tests.zero.ranks import on_ranks

COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 64 "
    "--num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --train-iters 4 --micro-batch-size 1 "
    "--eval-iters 0 --device cpu --lr 1e-2"
).split()
NODES, MICRO_BATCHES, STEPS, BATCH = 2, 2, 2, 24
WHOLE = "--recompute-granularity full --recompute-method uniform"
SETTINGS: dict[str, dict[str, str]] = {  # by kind, of which a pair has one each
    "stage": {f"stage {stage}": f"--zero-stage {stage}" for stage in (0, 1, 2, 3)},
    "weights": {
        "qwZ int8": "--zero-quantized-weights",
        "qwZ delta4": "--zero-quantized-weights --zero-quantized-weights-format delta4",
    },
    "hpZ": {f"hpZ {size}": f"--zero-hpz-partition-size {size}" for size in (2, "auto")},
    "gradients": {
        "qgZ int4": "--zero-quantized-gradients",
        "qgZ int8": "--zero-quantized-gradients --zero-quantized-gradients-format int8",
        "qgZ rotated4": "--zero-quantized-gradients --zero-quantized-gradients-format rotated4",
    },
    "groups": {f"groups {size}": f"--zero-gradient-partition-size {size}" for size in (1, 2, "auto")},
    "sums": {"sums in bf16": "--grad-reduce-in-bf16"},
    "prefetch": {f"prefetch {units}": f"--zero-prefetch-units {units}" for units in (0, 2)},
    "unit": {"sublayers": "--zero-unit sublayer"},
    "tying": {"untied": "--untie-embeddings-and-output-weights"},
    "tensor": {"tensor ranks": "--tensor-model-parallel-size 2"},
    "context": {"context ranks": "--context-parallel-size 2 --attention-dropout 0"},
    "optimizer": {"Muon": "--optimizer muon"},
    "states": {
        "moments in bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "moments in fp8": "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
        "weights in 24 bits": "--use-precision-aware-optimizer --main-params-dtype bf16+8",
    },
    "rates": {"decoupled rate": "--decoupled-lr 3e-3"},
    "offload": {"offloaded optimizer": "--zero-offload-optimizer"},
    "precision": {"fp32": "--fp32", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536"},
    "fp8": {
        "fp8 tensorwise": "--fp8",
        "fp8 delayed": "--fp8 --fp8-recipe delayed",
        "fp8 weights": "--fp8 --fp8-param-gather",
        "fp8 output": "--fp8 --fp8-output-layer",
    },
    "recomputation": {
        "recomputed scores": "--recompute-granularity selective",
        "recomputed layers": WHOLE,
        "recomputed pairs": f"{WHOLE} --recompute-num-layers 2",
        "recomputed block": "--recompute-granularity full --recompute-method block",
        "MLPs in chunks": "--mlp-chunks-for-training 2",
        "offloaded inputs": f"{WHOLE} --recompute-offload",
    },
    "attention": {
        "attention math": "--attention-backend math",
        "attention flash": "--attention-backend flash --attention-dropout 0",
    },
    "window": {"window": "--window-size 4,0"},
    "scores": {"soft cap and sinks": "--attn-logit-softcapping 5 --softmax-type learnable"},
    "documents": {"masked documents": "--reset-attention-mask --eod-mask-loss"},
    "model": {
        "Llama": "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--group-query-attention --num-query-groups 2"
    },
}
NEEDS = {  # by the beginning of a flag: what is added where a pair does not say it
    "--zero-hpz": "--zero-stage 3",
    "--zero-prefetch": "--zero-stage 3",
    "--zero-quantized": "--zero-stage 3",
    "--zero-gradient": "--zero-stage 2",
    "--fp8": "--bf16",
    "--main-params": "--bf16",
}
KIND_OF = {name: kind for kind, settings in SETTINGS.items() for name in settings}
FLAGS_OF = {name: flags for settings in SETTINGS.values() for name, flags in settings.items()}
Pair = tuple[str, str]
Outcome = tuple[str, str]  # ran, accepted, refused or failed; the line that says why
PRECISIONS = {"--fp32", "--bf16", "--fp16"}
BELOW_3 = {"stage 0", "stage 1", "stage 2"}


def flags_of(names: Pair) -> list[str]:
    """The flags of some settings, and those that they need."""
    flags = " ".join(map(FLAGS_OF.__getitem__, names)).split()
    if "delta4" in flags and "--zero-hpz-partition-size" not in flags and not BELOW_3 & set(names):
        flags += ["--zero-hpz-partition-size", "auto"]
    for start, needed in NEEDS.items():
        flag = needed.split()[0]
        given = PRECISIONS & set(flags) if flag in PRECISIONS else flag in flags
        if not given and any(each.startswith(start) for each in flags):
            flags += needed.split()
    return flags


def ranks_of_a_node(names: Pair) -> int:
    """2, and more where groups are parts of a node, or would be if other ranks did not share it."""
    parts = any(name.endswith(" 2") and name != "prefetch 2" for name in names)
    return 4 if parts or {"tensor ranks", "context ranks"} == set(names) else 2


def attempt_all(topology: Topology, pairs: list[Pair]) -> list[Outcome]:
    """Two steps of each pair on this rank of a job."""
    return [attempt(topology, names) for names in pairs]


def attempt(topology: Topology, names: Pair) -> Outcome:
    """Two steps of a model with some settings. Raises what is no refusal."""
    try:
        config = parse_args([*COMMON, *flags_of(names)])
        distributed = config.distributed
        mesh = topology.mesh(distributed.tensor_model_parallel_size, distributed.context_parallel_size)
        inputs = check_inputs(config, mesh, lambda line: None)
        check_routes(config.zero, mesh)
        if {"offloaded optimizer", "offloaded inputs"} & set(names):
            return "accepted", "needs GPUs"
        device = prepare_device(config, topology)
        engine = build_engine(config, inputs.tokenizer["vocab_size"], device, topology)
    except (UsageError, ValueError) as error:
        if not str(error).startswith("--"):
            raise
        return "refused", str(error)
    rates = config.learning_rate.lr, config.learning_rate.decoupled_lr
    for step in range(STEPS):
        for index in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(mesh.data_rank + 100 * index + 1000 * step)
            tokens = torch.randint(200, (config.training.micro_batch_size, 33), generator=generator)
            loss = engine.accumulate(tokens, index=index, micro_batches=MICRO_BATCHES)
        result = engine.step(*rates)
        if not (torch.isfinite(loss) and result.skipped.item() == 0):
            raise ArithmeticError(f"step {step}: loss {loss.item()}, skipped {result.skipped.item()}")
    engine.close()
    return "ran", ""


def outcomes(pairs: list[Pair], local: int) -> list[Outcome]:
    """What became of each of some pairs; those of an attempt that an error ended are tried in halves."""
    try:
        return on_ranks(NODES * local, attempt_all, pairs, ranks_per_node=local)[0]
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        if len(pairs) == 1:
            return [("failed", str(error).strip().splitlines()[-1])]
    half = len(pairs) // 2
    return outcomes(pairs[:half], local) + outcomes(pairs[half:], local)


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--only", default="", help="pairs that have a setting with this in its name")
    options = parser.parse_args()
    pairs = [
        pair
        for pair in combinations(KIND_OF, 2)
        if KIND_OF[pair[0]] != KIND_OF[pair[1]] and any(options.only in name for name in pair)
    ]
    found: dict[Pair, Outcome] = {}
    for local in (2, 4):
        chosen = [pair for pair in pairs if ranks_of_a_node(pair) == local]
        for first in range(0, len(chosen), BATCH):
            batch = chosen[first : first + BATCH]
            found |= zip(batch, outcomes(batch, local), strict=True)
            print(f"{len(found)} of {len(pairs)} pairs", file=sys.stderr, flush=True)
    for pair in pairs:
        if found[pair][0] in ("refused", "failed"):
            print(f"{' × '.join(pair):<40} {': '.join(found[pair])}")
    counts = Counter(kind for kind, _ in found.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if not options.only:
        lines = {" × ".join(pair): ": ".join(filter(None, found[pair])) for pair in pairs}
        print(f"written to {save_result('flag_pairs', {'counts': counts, 'pairs': lines}, RESULTS)}")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
