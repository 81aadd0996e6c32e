#!/bin/sh
# The Oracle Cacher of the job in job.toml: SECRET=secret.txt examples/two_hosts/cacher.sh HOST:PORT [--SECTION.KEY VALUE …]
listen="${1:?expected the address to listen on, HOST:PORT}"
secret="$(realpath "${SECRET:?expected a file with a secret}")"
shift
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-.venv/bin/python}" -m cacher --config examples/two_hosts/job.toml --listen "$listen" \
    --secret-file "$secret" "$@"
