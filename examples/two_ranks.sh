#!/bin/sh
# Two ranks on this machine. Each has a cache of its own; results equal those of `--cache.rows 0`, bit for bit.
#   examples/two_ranks.sh --cacher.assign locality --result out.json
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" \
    -m trainer --config trainer/configs/synthetic.toml "$@"
