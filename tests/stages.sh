#!/usr/bin/env bash
# The test suite in stages, the time of each printed. With TRSERVE_FULL=1 counts are full, a stage
# may take long, and the others run though one has failed; without, none should take more than three
# minutes, which is said, and the first failure is the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
should=180 limit=600  # a busy machine may have a third of its speed, and that is no failure
[ -n "${TRSERVE_FULL:-}" ] && limit=3600
# Two pools of threads that fight for two cores cost 10x and more; servers set their own.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Packages that only some tests want, too large for everybody: `make extras`.
[ -d .extras ] && export PYTHONPATH="$PWD/.extras${PYTHONPATH:+:$PYTHONPATH}"
total=$SECONDS

stage() {
  local name=$1 began=$SECONDS
  shift
  echo "== $name"
  if timeout --kill-after=10 "$limit" "$@"; then
    echo "== $name: $((SECONDS - began)) s$(late $((SECONDS - began)))"
  else
    echo "== $name failed after $((SECONDS - began)) s"
    fail "$name"
  fi
}

late() { [ -n "${TRSERVE_FULL:-}" ] || [ "$1" -le "$should" ] || echo ", more than $should s"; }

# What has failed is written down, because a stage may be in a process of its own.
failed=$(mktemp)
fail() {
  echo "$1" >>"$failed"
  [ -n "${TRSERVE_FULL:-}" ] || exit 1
}

# A test that hangs shows where, before its stage is ended.
hang=()
[ -n "${TRSERVE_FULL:-}" ] || hang=(-o "faulthandler_timeout=$((limit - 20))")
suite() { stage "$1" "$bin/python" -m pytest "${hang[@]}" "${@:2}"; }

# A stage of one busy process goes beside another of the kind, one on each core: what it prints comes
# after what the other does.
said=$(mktemp)
beside=
trap '[ -z "$beside" ] || kill "$beside" 2>/dev/null || true; rm -f "$said" "$failed"' EXIT
begin() {
  "$@" >"$said" 2>&1 &
  beside=$!
}
finish() {
  local status=0
  wait "$beside" || status=$?
  beside=
  cat "$said"
  [ "$status" = 0 ] || exit "$status"
}

stage lint "$bin/ruff" check .
stage format "$bin/ruff" format --check .
suite "shared memory and launcher" tests/ipc tests/launcher tests/trace tests/test_serverproc.py \
  tests/test_pitfalls.py tests/terminal --ignore tests/ipc/device
begin stage types env -u PYTHONPATH "$bin/mypy"  # the extras are not in every environment
suite "scheduling" tests/sched
finish
begin suite "models and workers" tests/models tests/workers --ignore tests/models/cuda \
  --ignore tests/workers/cuda --ignore tests/workers/tp
suite "routers" tests/router_lib tests/router_check tests/router_convert tests/calibration \
  tests/training
finish
begin suite "gateway" tests/gateway
suite "solver and plans" tests/solver tests/test_plan_command.py
finish
begin suite "GPU parts and tensor parallel" tests/models/cuda tests/workers/cuda tests/workers/tp \
  tests/ipc/device tests/gpus
suite "several hosts" tests/edge tests/cluster
finish
begin suite "golden equality" -rP tests/golden/test_golden.py
suite "golden reference" tests/golden/test_re*.py tests/golden/test_ro*.py tests/golden/test_sh*.py
finish
weights_and_pressure() {
  suite "published weights" tests/realmodel
  suite "golden equality under pressure" -rP tests/golden/test_adverse.py
}
begin weights_and_pressure
suite "golden equality of all else" tests/golden --ignore-glob "*/test_re*.py" \
  --ignore-glob "*/test_ro*.py" --ignore-glob "*/test_sh*.py" --ignore tests/golden/test_golden.py \
  --ignore tests/golden/test_adverse.py --ignore tests/golden/test_seeds.py
finish
begin suite "golden seeds" -rP tests/golden/test_seeds.py
suite "engine" tests/engine
finish
begin suite "killed workers" tests/faults/test_worker_kills.py
suite "black box, a to k" tests/blackbox/test_[a-k]*.py
finish
begin suite "faults" tests/faults --ignore tests/faults/test_worker_kills.py
suite "black box, l to z" tests/blackbox/test_[l-z]*.py
finish
begin suite "embedded pair" tests/demo
suite "clients, page and documents" tests/clients tests/page tests/docs
finish
suite "emulated devices and benchmarks" tests/emulated tests/bench
echo "== all: $((SECONDS - total)) s"
if [ -s "$failed" ]; then
  echo "== failed: $(paste -sd, "$failed")"
  exit 1
fi
