"""The shortest command line of pretrain_gpt.py that is whole."""

MINIMAL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
).split()


def without(*flags: str) -> list[str]:
    """MINIMAL without some flags and their values."""
    rest = list(MINIMAL)
    for flag in flags:
        start = rest.index(flag)
        del rest[start : start + 2]
    return rest
