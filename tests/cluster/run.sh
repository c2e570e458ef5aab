#!/usr/bin/env bash
# Runs tests/cluster in a network namespace of its own: pods get addresses there that lead nowhere else. Builds the control
# plane where it is missing. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
LONGLEAF_CHART_TOOLS=$(tests/charts/tools.sh)
LONGLEAF_CONTROL_PLANE=$(tests/cluster/build.sh)
export LONGLEAF_CHART_TOOLS LONGLEAF_CONTROL_PLANE
exec unshare --net sh -c 'ip link set lo up && ip address add 10.77.0.1/24 dev lo && exec "$@"' sh \
  .venv/bin/python -m pytest tests/cluster "$@"
