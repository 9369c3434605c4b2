#!/usr/bin/env bash
# From nothing to text written by a GPT of your own: environment, corpus, tokenizer, data set, pretraining,
# evaluation, loss curve, samples. Everything is written to ./quickstart (or QUICKSTART_DIR). Finished
# steps are kept: a second call continues where the first one stopped.
# Arguments are appended to pretrain_gpt.py's: launch/quickstart.sh --train-iters 1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 # lines appear as they are printed, through pipes too

work=${QUICKSTART_DIR:-quickstart}
launch/setup_venv.sh requirements.txt
started=$SECONDS
python=.venv/bin/python
mkdir -p "$work"

step() { echo; echo "=== [$((SECONDS - started)) s] $*"; }

step "1/5 corpus: the source of Python's standard library"
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
        "${tokenizer[@]}" --append-eod --workers "$(nproc)"
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 0)); then
    processes=$gpus
    shape=(--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512
        --micro-batch-size 16 --global-batch-size $((16 * gpus)) --train-iters 1500 --lr-warmup-fraction 0.08
        --eval-interval 250)
else
    processes=$(nproc)
    ((processes <= 8)) || processes=8
    # Gradients are summed over micro-batches, so the result is the same however the batch is divided.
    while ((8 % processes)); do processes=$((processes - 1)); done
    micro=$((8 / processes))
    ((micro <= 4)) || micro=4
    shape=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256
        --micro-batch-size "$micro" --global-batch-size 8 --train-iters 480 --lr-warmup-fraction 0.08
        --eval-interval 120)
fi
step "4/5 pretraining on $([[ $gpus -gt 0 ]] && echo "$gpus GPU(s)" || echo "$processes CPU process(es)")"
PYTHON=$python launch/local.sh -n "$processes" pretrain_gpt.py \
    --data-path "$work/corpus_text_document" --split 95,4,1 "${tokenizer[@]}" \
    "${shape[@]}" --attention-dropout 0 --hidden-dropout 0 \
    --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 \
    --log-interval 20 --eval-iters 20 \
    --save "$work/checkpoints" --load "$work/checkpoints" --save-interval 120 \
    --metrics-file "$work/metrics.jsonl" "$@"

step "5/5 loss curve and samples"
"$python" -m megatron_zpp.commands.plot "$work/metrics.jsonl" --output "$work/loss.png"
"$python" -m megatron_zpp.commands.report "$work/metrics.jsonl" --checkpoint "$work/checkpoints" \
    --title "quickstart" --output "$work/report.html"
"$python" -m megatron_zpp.commands.sample --load "$work/checkpoints" --num-samples 2 --max-new-tokens 160 \
    --prompt "def main():" | tee "$work/sample.txt"

step "done: $work/report.html is a page about the run, $work/loss.png the curve, $work/sample.txt the text, $work/checkpoints the model"
