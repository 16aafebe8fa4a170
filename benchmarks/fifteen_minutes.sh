#!/usr/bin/env bash
# Measure what matters most on a Hopper card that is lent for a quarter of an hour.
#
#   bash benchmarks/fifteen_minutes.sh 1 2 3 4 5     # at most 360 s
#   bash benchmarks/fifteen_minutes.sh 6 7 8 9 10    # at most 390 s
#   SMOKE=--smoke bash benchmarks/fifteen_minutes.sh # rehearse all but 3 on a CPU
#
#        s
#    1   60  a step of a 7B block: bf16, delayed, block, current, each alone for 5 s; kernel times
#    2   60  what 1 had no time for; the same without an optimizer
#    3  120  python -m jfp8 check
#    4   60  block matmuls: tiles, 4 and 5 stages
#    5   60  cuDNN's attention in FP8
#    6  150  a language model of width 2048: bf16 and delayed
#    7   60  narrow linear layers
#    8   60  experts, next to batched bf16
#    9   60  Transformer Engine's GPT layer, forward and backward, alone
#   10   60  fusions, quantizers
#   11   60  if time is left: a linear layer of 8192, at last with MXFP8 and by Flax
#
# A repeated call measures what is still missing. Records are in runs/card.jsonl, and copied to $OUT
# if that is set: `python benchmarks/gpu.py --table runs/card.jsonl` prints them, and
# `--summary benchmarks/results/gpu_NAME.json` keeps them. Call 4 with the inner loop of an older commit:
#   mkdir -p runs/before && git archive b316308b jfp8 | tar -x -C runs/before && cp -r benchmarks runs/before
#   (cd runs/before && NAME=before bash benchmarks/fifteen_minutes.sh 4)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
smoke=${SMOKE:-}
name=${NAME:-card}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p runs

# gpu MINUTES SECTIONS [GROUPS]; a smoke test has as long as it needs, and groups of other names.
gpu() {
  local limits=(--minutes "$1" --groups "${3:-}")
  [ -z "$smoke" ] || limits=("$smoke")
  "$python" benchmarks/gpu.py --sections "$2" "${limits[@]}" --records "runs/$name.jsonl" --log "runs/$name.log" |
    grep -E '^[a-z]+: '
}

lm() {
  local sizes=(--minutes 2.5 --width 2048 --layers 16 --batch-size 8 --chunk 10)
  [ -z "$smoke" ] || sizes=("$smoke")
  "$python" benchmarks/lm_on_gpu.py "${sizes[@]}" --out "runs/$name.lm.jsonl"
}

call() {
  case $1 in
    1) gpu 1 alone '7B block, step' ;;
    2) gpu 1 alone '7B block' ;;
    3) [ -n "$smoke" ] || timeout 120 "$python" -m jfp8 check ;;
    4) gpu 1 fusions 'tiles of block' ;;
    5) gpu 1 attention ;;
    6) lm ;;
    7) gpu 1 linear '^(8192x768|32768|49152|8192x4096)' ;;
    8) gpu 1 experts ' equal' ;;
    9) gpu 1 alone 'GPT' ;;
    10) gpu 1 'fusions,quantize' '^(MLP|q,|[0-9])' ;;
    11) gpu 1 linear '^8192x8192' ;;
    *) echo "no call $1: 1 to 11" >&2 && exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- 1 2 3 4 5 6 7 8 9 10 11
for number; do
  echo "== $number"
  call "$number"
  [ -z "${OUT:-}" ] || cp "runs/$name".* "$OUT"
done
