#!/usr/bin/env bash
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 from Debian 12's source package with Debian's
# Go, installs etcd and iproute2, and prints the folder of the binaries. Minutes on two cores and 1.6 GB of scratch, once:
# they are kept outside the repository, in LONGLEAF_CACHE, default ~/.cache/longleaf.
set -euo pipefail
version=1.20.2
plane=${LONGLEAF_CACHE:-$HOME/.cache/longleaf}/control-plane-$version
export DEBIAN_FRONTEND=noninteractive
need=()
for package in etcd-server iproute2 openssl; do
  dpkg-query -W -f='${Status}' $package 2>/dev/null | grep -q 'ok installed' || need+=("$package")
done
[ -e "$plane/.ready" ] || need+=(dpkg-dev golang-1.19-go golang-github-modern-go-reflect2-dev)
if ((${#need[@]})); then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${need[@]}"; } >/dev/null
fi
if [ -e "$plane/.ready" ]; then
  echo "$plane"
  exit
fi
mkdir -p "$plane"
work=$(mktemp -d "$plane/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$work"/go/src/k8s.io "$work"/bin
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/debian.sources"
cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/debian.sources";
Dir::Etc::sourceparts "-";
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
CONF
(
  cd "$work"
  export APT_CONFIG=$work/apt.conf
  apt-get update -qq
  apt-get source --download-only -qq kubernetes
) >&2
tar xzf "$work"/kubernetes_*.orig.tar.gz -C "$work/go/src/k8s.io"
mv "$work/go/src/k8s.io/kubernetes-$version" "$work/go/src/k8s.io/kubernetes"
cd "$work/go/src/k8s.io/kubernetes"
# Go 1.18 and newer crash in the vendored reflect2 1.0.1; Debian has 1.0.2.
reflect=vendor/github.com/modern-go/reflect2
rm -rf "$reflect" && mkdir "$reflect"
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect/"
rm -f "$reflect"/*_test.go
export GO111MODULE=off GOFLAGS= CGO_ENABLED=0 GOPATH=$work/go GOCACHE=$work/go-cache PATH=/usr/lib/go-1.19/bin:$PATH
# The source package leaves out the generated OpenAPI definitions.
go build -o "$work/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(grep -rl '+k8s:openapi-gen=' --include='*.go' staging/src pkg cmd plugin |
  grep -v -E '_test.go|zz_|/testdata/|code-generator|sample-' | xargs -n1 dirname | sort -u |
  sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e 's#^\(pkg\|cmd\|plugin\)/#k8s.io/kubernetes/\1/#' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$work/report.txt" >&2
flags="-s -w"
for package in vendor/k8s.io/component-base/version vendor/k8s.io/client-go/pkg/version; do
  flags+=" -X k8s.io/kubernetes/$package.gitVersion=v$version"
  flags+=" -X k8s.io/kubernetes/$package.gitMajor=1 -X k8s.io/kubernetes/$package.gitMinor=20"
done
for name in kube-apiserver kube-controller-manager kube-scheduler; do
  go build -p 2 -ldflags "$flags" -o "$work/bin/$name" "k8s.io/kubernetes/cmd/$name"
done
mv "$work"/bin/* "$plane/"
touch "$plane/.ready"
echo "$plane"
