#!/usr/bin/env bash
# From nothing to text written by a GPT of your own: environment, corpus, tokenizer, data set, pretraining,
# evaluation, texts, loss curve, and what to do next. Everything is written to quickstart in the repository (or
# QUICKSTART_DIR).
# Finished steps are kept: a second call continues where the first one stopped.
# --arch llama trains a Llama-like model of as many parameters instead of a GPT-2, beside it.
# Other arguments are appended to pretrain_gpt.py's: launch/quickstart.sh --train-iters 1000
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/flags.sh
source launch/flags.sh
export PYTHONUNBUFFERED=1 # lines appear as they are printed, through pipes too

arch=gpt2
flags=()
while (($#)); do
    case $1 in
        --arch=*) arch=${1#*=} ;;
        --arch) arch=${2-} && shift $(($# > 1)) ;;
        -h | --help) sed -n '2,/^set/s/^# //p' launch/quickstart.sh && exit ;;
        *) flags+=("$1") ;;
    esac
    shift
done
case $arch in
    gpt2) suffix="" ;;
    llama) suffix=-llama ;;
    *) echo "quickstart.sh: error: --arch ${arch:-(not given)}: must be gpt2 or llama" >&2 && exit 2 ;;
esac

work=${QUICKSTART_DIR:-quickstart}
[[ -z ${QUICKSTART_DIR:-} || $work == /* || $from == "$PWD" ]] || work=$from/$work
cores=$(env -u OMP_NUM_THREADS nproc) # nproc would print that variable
launch/setup_venv.sh 'requirements.txt[run,plots]'
started=$SECONDS
python=.venv/bin/python
mkdir -p "$work"

plan="python -m megatron_zpp plan --model-preset 13b --global-batch-size 512 \\
    --plan-nodes 4 --plan-gpus-per-node 8 --plan-gpu h100 --plan-link-gbit 25"
step() { echo; echo "=== [$((SECONDS - started)) s] $*"; }

step "1/5 corpus: the source of Python's standard library, without its tests"
if [[ -e $work/corpus.jsonl ]]; then
    echo "already there: $work/corpus.jsonl"
else
    "$python" data/build_corpus.py --output "$work/corpus.jsonl"
fi

step "2/5 tokenizer: SentencePiece BPE of 4,096 pieces"
if [[ -e $work/tokenizer.model ]]; then
    echo "already there: $work/tokenizer.model"
else
    "$python" data/train_tokenizer.py --input "$work/corpus.jsonl" --vocab-size 4096 \
        --output-prefix "$work/tokenizer" --max-train-mib 4
fi

tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$work/tokenizer.model")
step "3/5 data set: tokens in .bin and .idx"
if [[ -e $work/corpus_text_document.idx ]]; then
    echo "already there: $work/corpus_text_document.idx"
else
    "$python" data/preprocess_data.py --input "$work/corpus.jsonl" --output-prefix "$work/corpus" \
        "${tokenizer[@]}" --append-eod --workers "$cores"
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 0)); then
    processes=$gpus
    groups=4 inner=1560 # of a Llama with the GPT-2's count of parameters
    shape=(--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512
        --micro-batch-size 16 --global-batch-size $((16 * gpus)) --train-iters $((iterations = 1500)) --lr 2e-3
        --eval-interval 250)
else
    processes=$cores
    ((processes <= 8)) || processes=8
    # Gradients are summed over micro-batches, so the result is the same however the batch is divided.
    while ((8 % processes)); do processes=$((processes - 1)); done
    micro=$((8 / processes))
    ((micro <= 4)) || micro=4
    groups=2 inner=792
    # In minutes of two cores a small model that sees more tokens learns more than a larger one.
    shape=(--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256
        --micro-batch-size "$micro" --global-batch-size 8 --train-iters $((iterations = 800)) --lr 3e-3
        --eval-interval 200)
fi
[[ $arch == gpt2 ]] || shape+=(--position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --group-query-attention --num-query-groups "$groups" --ffn-hidden-size "$inner")
trained=$(last_value --train-iters ${flags[@]+"${flags[@]}"}) interval=40
[[ ! $trained =~ ^[1-3]?[0-9]$ ]] || interval=1 # the curve needs a loss that was logged
step "4/5 pretraining of a $arch on $([[ $gpus -gt 0 ]] && echo "$gpus GPU(s)" || echo "$processes CPU process(es)")"
PYTHON=$python launch/local.sh -n "$processes" pretrain_gpt.py \
    --data-path "$work/corpus_text_document" --split 95,4,1 "${tokenizer[@]}" \
    "${shape[@]}" --attention-dropout 0 --hidden-dropout 0 \
    --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08 --weight-decay 0.1 --adam-beta2 0.95 \
    --log-interval "$interval" --eval-iters 20 --sample-prompt 'def main():' 'class Reader' 'import sys' \
    --save "$work/checkpoints$suffix" --load "$work/checkpoints$suffix" --save-interval 120 \
    --metrics-file "$work/metrics$suffix.jsonl" ${flags[@]+"${flags[@]}"}

step "5/5 loss curve and samples"
curves=("$work/metrics$suffix.jsonl")
[[ -z $suffix || ! -e $work/metrics.jsonl ]] || curves=("$work/metrics.jsonl" "${curves[@]}")
"$python" -m megatron_zpp plot "${curves[@]}" --output "$work/loss$suffix.png"
"$python" -m megatron_zpp report "$work/metrics$suffix.jsonl" --checkpoint "$work/checkpoints$suffix" \
    --title "quickstart" --output "$work/report$suffix.html"
"$python" -m megatron_zpp sample --load "$work/checkpoints$suffix" --num-samples 2 \
    --max-new-tokens 160 --prompt "def main():" | tee "$work/sample$suffix.txt"

printf -v quoted %q "$work"
again="${QUICKSTART_DIR:+QUICKSTART_DIR=$quoted }launch/quickstart.sh"
((${#flags[@]} == 0)) || again+=$(printf ' %q' "${flags[@]}")
there=''
[[ $from == "$PWD" ]] || printf -v there 'cd %q\n' "$PWD"
step "done, in $work: report$suffix.html has curves and texts, loss$suffix.png the curve, checkpoints$suffix the model"
cat <<END

Next, of which each line runs as it is:

${there}source .venv/bin/activate

# More text from this model
python -m megatron_zpp sample --load $quoted/checkpoints$suffix --prompt "import os" "class Error"

# The same run, twice as long: it resumes where this one ended
$again${suffix:+ --arch $arch} --train-iters $((2 * ${trained:-$iterations}))

# $([[ $suffix ]] && echo "A GPT-2 to compare with" || echo "A Llama-like model of as many parameters"); its curve is drawn beside this one
$again --arch $([[ $suffix ]] && echo gpt2 || echo llama)

# What 13 billion parameters take on 4 nodes of 8 GPUs, and the best settings for them; this needs no GPU
$plan

Your own text: README.md, "Your own text".
END
