#!/bin/sh
# One host's ranks of the job in job.toml. Run it on every host, with the same HEAD:
#   HEAD=node-a SECRET=secret.txt examples/two_hosts/node.sh --cacher.url HOST:PORT --store.url redis://HOST:PORT
secret="$(realpath "${SECRET:?expected the file with the secret of the cacher}")"
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-1}" --rdzv-id "${JOB:-two-hosts}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?expected the name of the node where torchrun meets}:29500" \
    -m trainer --config examples/two_hosts/job.toml --cacher.secret_file "$secret" "$@"
