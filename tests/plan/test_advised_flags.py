"""What a plan advises is accepted: each set of flags that it prints, in the command line that was planned."""

import re
from collections.abc import Iterator

import pytest

from megatron_zpp.config.shapes.tensor_parallel import FLAG
from tests.plan.jobs import printed

PLAN = (
    "--dry-run --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --lr 1e-4 --train-iters 9 "
    "--model-preset 1.3b --plan-nodes 4 --plan-gpus-per-node 8 --plan-link-gbit 50"
)
FITS = f"{PLAN} --micro-batch-size 2 --global-batch-size 128"
TOO_LARGE = f"{PLAN} --micro-batch-size 64 --global-batch-size 2048"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform"
STAGE_3 = "--zero-stage 3"
EVERYTHING = f"{STAGE_3} --zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients"
DELTAS = f"{EVERYTHING} --zero-quantized-weights-format delta4 --zero-quantized-gradients-format rotated4"
CASES = {  # a command line, and a part of what is said of it
    f"{FITS} {STAGE_3}": " --zero-quantized-gradients --zero-gradient-partition-size auto:\n",
    f"{FITS} {STAGE_3} --plan-link-gbit 400": " --zero-quantized-weights --zero-hpz-partition-size auto",
    f"{FITS} {STAGE_3} --grad-reduce-in-bf16": "--zero-quantized-gradients without --grad-reduce-in-bf16\n",
    f"{FITS} {STAGE_3} --zero-prefetch-units 1": "  --zero-stage 1 without --zero-prefetch-units fits as",
    f"{FITS} {STAGE_3} --zero-hpz-partition-size auto": "--zero-stage 1 --zero-hpz-partition-size 1 fits as",
    f"{FITS} {EVERYTHING} --plan-nodes 1": "none of them (--zero-hpz-partition-size 1 without "
    "--zero-quantized-weights --zero-quantized-gradients):\n",
    f"{FITS} {DELTAS}": "  take --zero-",
    f"{FITS} {DELTAS} --plan-link-gbit 9000": ":\n    no ",
    f"{FITS} {STAGE_3} --fp8 --fp8-recipe delayed --fp8-param-gather --fp8-output-layer": "take ",
    f"{TOO_LARGE} {STAGE_3} --zero-table-rows 4095": " without --zero-table-rows",
    f"{FITS} --zero-stage 1 --zero-gradient-partition-size auto": "take ",
    f"{FITS} {STAGE_3} --tensor-model-parallel-size 2": "  1 --micro-batch-size 1",
    f"{TOO_LARGE} --zero-stage 1 --grad-reduce-in-bf16": "does NOT fit",
    f"{TOO_LARGE} {DELTAS} --recompute-activations": f"    {RECOMPUTED} without --recompute-activations",
    f"{TOO_LARGE} {STAGE_3} --zero-gradient-partition-size 4": "none of them (--zero-gradient-",
}


def advised(lines: list[str]) -> Iterator[list[str]]:
    """Every set of flags that the lines advise, as the names of the changes that it consists of."""
    table, rows = "", list[str]()
    for line in lines:
        row = re.match(r"(?: {4}|[ *] )(\S.*?)(?: {2,}|$)", line)
        if line.endswith("would change that:") or line.startswith(("ZeRO++ at", "tensor ranks, same")):
            table, rows = line, []
        elif not line:
            table = ""
        if found := re.match(r"  (\S.*) fits as well, in |  advice: (\S.*?) would |  take (.*?):?$", line):
            yield [next(filter(None, found.groups()))]
        elif table and row and line != table and "ms per step" not in line and " no set of" not in line:
            if row[1] == "all of these":
                yield rows
            else:
                rows.append(f"{FLAG} {row[1]}" if table.startswith("tensor ranks") else row[1])
                yield rows[-1:]


def applied(argv: list[str], names: list[str]) -> list[str]:
    """The command line with the flags to give, and without those to omit."""
    for name in names:
        given, _, omitted = name.removeprefix("none of them").strip(" ()").partition("without ")
        for flag in set(omitted.split()) & set(argv):
            start = argv.index(flag)
            end = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("--")), len(argv))
            argv = argv[:start] + argv[end:]
        argv = [*argv, *given.split()]
    return argv


@pytest.mark.parametrize(
    "command",
    [pytest.param(case, marks=pytest.mark.nightly if place % 5 else ()) for place, case in enumerate(CASES)],
    ids=lambda command: command.split("size ", 2)[2],
)
def test_every_set_of_flags_is_accepted_by_the_run(command: str) -> None:
    said = printed(*command.split())
    assert CASES[command] in said, said
    sets = list(advised(said.splitlines()))
    assert len(sets) >= 2
    for names in sets:
        omitted = " ".join(name.strip(")").partition("without ")[2] for name in names)
        assert set(omitted.split()) <= set(command.split())
        printed(*applied(command.split(), names), speaks=False)
