"""Command lines of pretrain_gpt.py: the shortest one that is whole, and that of the smallest run."""

MINIMAL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
).split()
SMALLEST = (  # a flag that is given again has the later value
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --log-interval 1"
).split()


def without(*flags: str) -> list[str]:
    """MINIMAL without some flags and their values."""
    rest = list(MINIMAL)
    for flag in flags:
        start = rest.index(flag)
        del rest[start : start + 2]
    return rest
