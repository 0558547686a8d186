#!/usr/bin/env bash
# The first day on a GPU: checks and measures all that needs one, in nine minutes at most, without a network.
#
#     bash docs/experiments/gpu/gpu_day.sh              all parts
#     bash docs/experiments/gpu/gpu_day.sh tests        some parts alone, in the order below
#
# The parts run one after another, the most valuable first. Each has a limit in seconds and adds to a file of $OUT
# as it goes. A part that fails stops nothing. Without a GPU it is a rehearsal: small sizes, interpreted kernels.
#
#     OUT=gpu-day     the folder of the results; summary.txt has a line for each part
#     BUDGET=510      seconds for all parts together; a rehearsal, and each of its parts, has three times as long
#     REHEARSE=1      a rehearsal, also where there is a GPU
#     PYTHON=python3
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit
GPU=docs/experiments/gpu
OUT=$(realpath -m "${OUT:-gpu-day}")
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-510}
PARTS=${*:-machine tests varlen engine decode swap overlap plain settings eager peer sanitizer}
SUMMARY=$OUT/summary.txt
mkdir -p "$OUT"
: >"$SUMMARY"
# Few threads: many processes compile at the same time.
export TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export PYTHONPATH=$PWD:$PWD/$GPU:$PWD/docs/experiments:$PWD/docs/experiments/lib
export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false
if [[ -z ${REHEARSE:-} ]]; then
    REHEARSE=$("$PYTHON" -c 'import torch; print(int(not torch.cuda.is_available()))')
fi
export REHEARSE
SLOWNESS=$((REHEARSE ? 3 : 1))
END=$((SLOWNESS * BUDGET))

log() { printf '%4d s  %s\n' "$SECONDS" "$*" | tee -a "$SUMMARY"; }

# part NAME LIMIT FILE COMMAND…: run the command for at most LIMIT seconds, and within the budget.
part() {
    local name=$1 limit=$((SLOWNESS * $2)) file=$OUT/$3 began=$SECONDS left=$((END - SECONDS)) status
    shift 3
    [[ " $PARTS " == *" $name "* ]] || return 0
    if ((left < limit)); then limit=$left; fi
    if ((limit < 1)); then
        log "$name: NOT RUN, the time is over"
        return 0
    fi
    printf '\n==== %s, at most %d s: %s\n' "$name" "$limit" "$*" >>"$file"
    timeout --signal=INT --kill-after=5 "$limit" "$@" >>"$file" 2>&1 </dev/null
    status=$?
    case $status in
    0) log "$name: ok, $((SECONDS - began)) s" ;;
    124 | 137) log "$name: ENDED at its limit of $limit s" ;;
    *) log "$name: FAILED with status $status, $((SECONDS - began)) s: $(grep -aE '^(!!|E  |.*Error)' "$file" | tail -1 | cut -c1-200)" ;;
    esac
}

# pytest without plugins that might choose or order tests; of ours, the one that ends a spoiled process.
tests=(env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 "$PYTHON" -m pytest
    -p xdist.plugin -p end_spoiled_worker -p no:cacheprovider --tb=short --durations=15 tests/kernels/test_kernels.py)
gpu_tests=(-n 11 -m gpu tests/kernels/test_gpu.py --maxfail=25)
few_tests=(-n 0 -k in_each_type)
check=(compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20)
overlap=(--fork docs/forks/overlap/overlap.py --options '{"preemption": "recompute"}')
peer=(--baseline hf --options '{"preemption": "recompute"}' --requests 64 --max-input 256 --min-output 32 --max-output 128)
if ((REHEARSE)); then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    gpu_tests=("${few_tests[@]}")
    check=(env)
    overlap+=(--shape test --requests 4 --max-input 20 --min-output 2 --max-output 9)
    peer=(--baseline hf --shape test --requests 4 --max-input 20 --min-output 2 --max-output 9)
fi

((REHEARSE)) && log "a rehearsal: nothing here runs on a GPU, and times say nothing about one"
{
    git rev-parse HEAD
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm --format=csv,noheader
    nproc
    free -g | sed -n 2p
    which gcc nvcc compute-sanitizer
    "$PYTHON" -m pip list | grep -iE '^(torch|triton|transformers|numpy|flash-attn|pytest|pytest-xdist) '
} >"$OUT/environment.txt" 2>&1

part machine 60 machine.txt "$PYTHON" $GPU/gpu_day.py machine
part tests 150 tests.txt "${tests[@]}" "${gpu_tests[@]}"
part varlen 40 varlen.txt "$PYTHON" $GPU/gpu_day.py varlen
part engine 75 engine.txt "$PYTHON" $GPU/gpu_day.py engine
part decode 75 decode.txt "$PYTHON" $GPU/gpu_day.py decode
part swap 40 swap.txt "$PYTHON" $GPU/gpu_day.py swap
part overlap 60 overlap.txt "$PYTHON" bench.py "${overlap[@]}"
part plain 60 engine.txt "$PYTHON" $GPU/gpu_day.py plain
part settings 60 decode.txt "$PYTHON" $GPU/gpu_day.py settings
part eager 55 engine.txt "$PYTHON" $GPU/gpu_day.py eager
part peer 90 peer.txt "$PYTHON" bench.py "${peer[@]}"
if ((REHEARSE)) || command -v compute-sanitizer >/dev/null; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part sanitizer 75 sanitizer.txt "${check[@]}" "${tests[@]}" "${few_tests[@]}"
elif [[ " $PARTS " == *" sanitizer "* ]]; then
    log "sanitizer: NOT RUN, there is no compute-sanitizer"
fi
log "the end; the results lie in $OUT"
for file in machine tests varlen engine decode swap overlap peer; do
    if [[ -f $OUT/$file.txt ]]; then
        printf '\n==== %s.txt\n' "$file"
        grep -aE '^(!!|nanopaged|blocks|preemption|FAILED|ERROR|==|[a-z ]+:|[0-9 ,]+ (output|passed|failed|x))' "$OUT/$file.txt" | cut -c1-150 | tail -50
    fi
done
! grep -qE 'FAILED|ENDED' "$SUMMARY"
