"""What takes long to import, or may be missing, is imported by what needs it alone."""

from tests.support import run

OPTIONAL = "wandb datasets matplotlib apex sentencepiece tokenizers tensorboard zstandard transformers"
SLOW = "sympy torch._dynamo triton"  # half a second to two, which each start and each rank would pay


def test_a_run_that_does_not_need_optional_packages_does_not_import_them() -> None:
    done = run(
        "-c",
        "import sys\n"
        "sys.argv = 'pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 50 "
        "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
        "--train-iters 1 --lr 1e-3 --eval-iters 1 --num-workers 0'.split()\n"
        "import pretrain_gpt\n"
        "pretrain_gpt.main()\n"
        f"print('imported:', *(name for name in {(OPTIONAL + ' ' + SLOW).split()} if name in sys.modules))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
