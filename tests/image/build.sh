#!/usr/bin/env bash
# Builds the Dockerfile's target `gateway` with buildah, on a base that debootstrap makes, and prints the image's name.
# Needs root, no container engine. Base and storage are kept outside the repository: LONGLEAF_CACHE, default ~/.cache/longleaf.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${LONGLEAF_CACHE:-$HOME/.cache/longleaf}/image
export DEBIAN_FRONTEND=noninteractive
need=()
for package in buildah crun debootstrap; do
  command -v $package >/dev/null || need+=("$package")
done
if ((${#need[@]})); then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${need[@]}"; } >/dev/null
fi
mkdir -p "$cache"
storage=(--root "$cache/storage" --runroot "$cache/run" --storage-driver vfs)
if ! buildah "${storage[@]}" inspect --type image longleaf-base >/dev/null 2>&1; then
  rm -rf "$cache/base"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$cache/base" >&2
  rm -rf "$cache"/base/var/cache/apt/archives/*.deb "$cache"/base/var/lib/apt/lists/*
  container=$(buildah "${storage[@]}" from scratch)
  buildah "${storage[@]}" copy --quiet "$container" "$cache/base" / >/dev/null
  buildah "${storage[@]}" commit --quiet "$container" longleaf-base >/dev/null
  buildah "${storage[@]}" rm "$container" >/dev/null
  rm -rf "$cache/base"
fi
# The build itself needs no network: the locked wheels are fetched before.
"$root/.venv/bin/pip" download --quiet --disable-pip-version-check --require-hashes --no-deps \
  -r "$root/requirements.lock" -d "$cache/wheels" >&2
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$cache/pip.conf"
env -i PATH="$PATH" HOME="$HOME" buildah "${storage[@]}" bud --quiet --isolation chroot --pull-never --network host \
  --target gateway --build-arg GATEWAY_BASE=localhost/longleaf-base --build-arg REVISION="$(git -C "$root" rev-parse HEAD)" \
  --volume "$cache/wheels:/wheels:ro" --volume "$cache/pip.conf:/etc/pip.conf:ro" \
  --tag longleaf-gateway --file "$root/Dockerfile" "$root" >&2
buildah "${storage[@]}" rmi --prune >&2 # the image that had the name before
echo localhost/longleaf-gateway
