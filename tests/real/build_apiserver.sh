#!/bin/bash
# Build a real API server, scheduler and controller manager (Kubernetes 1.20.2) from Debian 12's own source package with Debian's Go,
# and lay etcd beside them. Needs root (Debian packages), about 5 minutes and 4 GB while it builds; leaves some 450 MB in FOLDER.
#
#   tests/real/build_apiserver.sh FOLDER
#
# Nothing happens where FOLDER is complete already. It appears only once it is: a build that was killed leaves none.
set -euo pipefail

FOLDER=$(realpath -m "${1:?usage: build_apiserver.sh FOLDER}")
PROGRAMS=(kube-apiserver kube-scheduler kube-controller-manager etcd)

complete() { for program in "${PROGRAMS[@]}"; do [ -x "$FOLDER/$program" ] || return 1; done; }

mkdir -p "$(dirname "$FOLDER")"
exec 9>"$FOLDER.lock"
flock 9 # two test runs at once: the second waits, and finds it done
if complete; then exit 0; fi
[ "$(id -u)" = 0 ] || { echo "build_apiserver.sh: needs root, to install Debian's Go." >&2; exit 1; }
. /etc/os-release
[ "${VERSION_CODENAME:-}" = bookworm ] || { echo "build_apiserver.sh: knows Debian 12 (bookworm) only, this is ${PRETTY_NAME:-unknown}." >&2; exit 1; }

WORK=$(mktemp -d "$FOLDER.XXXXXX")
trap 'chmod -R u+w "$WORK"; rm -rf "$WORK"' EXIT
started=$(date +%s)
say() { echo "build_apiserver.sh: $* ($(($(date +%s) - started)) s)"; }

export DEBIAN_FRONTEND=noninteractive
packages=(golang-go golang-github-modern-go-reflect2-dev dpkg-dev rsync jq)
if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
    apt-get -o DPkg::Lock::Timeout=300 update -qq
    apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi
say "Debian's Go is here"

# The machine's own mirror, with source packages too, in lists of our own: the machine's configuration stays as it is.
mkdir -p "$WORK"/apt/{lists/partial,cache/archives/partial} "$WORK"/{source,etcd,home,done}
mapfile -t lists < <(find /etc/apt/sources.list.d /etc/apt/sources.list -name '*.sources' 2>/dev/null)
awk 'BEGIN { RS = ""; ORS = "\n\n" } /Suites:[^\n]*bookworm([ \n]|$)/' "${lists[@]}" |
    sed 's/^Types:.*/Types: deb deb-src/' >"$WORK/apt/own.sources"
[ -s "$WORK/apt/own.sources" ] || { echo "build_apiserver.sh: found no .sources file of bookworm below /etc/apt." >&2; exit 1; }
own=(-o "Dir::Etc::sourcelist=$WORK/apt/own.sources" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$WORK/apt/lists" -o "Dir::Cache=$WORK/apt/cache" -o APT::Sandbox::User=root)
apt-get "${own[@]}" update -qq
(cd "$WORK/source" && apt-get "${own[@]}" source -qq kubernetes >"$WORK/source.log" 2>&1) || { cat "$WORK/source.log" >&2; exit 1; }
# Unpacked and not installed: the package would start a server on the machine.
(cd "$WORK/etcd" && apt-get "${own[@]}" download -qq etcd-server && dpkg -x etcd-server_*.deb .)
install -m 755 "$WORK/etcd/usr/bin/etcd" "$WORK/done/etcd"
say "the sources are here"

cd "$WORK"/source/kubernetes-*/
# The vendored reflect2 1.0.1 and Go 1.18 or newer crash on the first custom resource; Debian's 1.0.2 does not.
reflect2=vendor/github.com/modern-go/reflect2
rm -f "$reflect2"/*.go "$reflect2"/*.s
cp -L /usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect2/"
rm -f "$reflect2"/*_test.go
cat >"$WORK/version" <<VERSION
KUBE_GIT_COMMIT=0
KUBE_GIT_TREE_STATE=archive
KUBE_GIT_VERSION=v1.20.2
KUBE_GIT_MAJOR=1
KUBE_GIT_MINOR=20
VERSION
export CGO_ENABLED=0 GOFLAGS= GOPATH="$PWD/.go" HOME="$WORK/home" GOCACHE="$WORK/gocache" KUBE_GIT_VERSION_FILE="$WORK/version"
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
if ! make WHAT="cmd/kube-apiserver cmd/kube-scheduler cmd/kube-controller-manager" >"$WORK/make.log" 2>&1; then
    tail -40 "$WORK/make.log" >&2
    exit 1
fi
for program in kube-apiserver kube-scheduler kube-controller-manager; do
    install -m 755 "_output/local/bin/linux/$(go env GOARCH)/$program" "$WORK/done/$program"
done
"$WORK/done/kube-apiserver" --version
rm -rf "$FOLDER"
mv "$WORK/done" "$FOLDER"
say "built into $FOLDER"
