#!/usr/bin/env bash
# Run commands as a newcomer would: in a clone of this checkout, on a Debian 12 that has python3, venv, make and git.
#
#   scripts/bare_root.sh COMMAND...        each argument is one line for a shell: 'make demo' 'make test'
#
# The root file system comes from mmdebstrap and is thrown away afterwards. The machine around it must have mmdebstrap,
# and this must run as root with the right to make mount and process namespaces. The first command that fails is the
# last one; status 3 says that there was no root to run it in.
#
#   KVTIER_BARE_ROOT    keep the root file system in this folder and use it again; the clone in it is new each time
#   KVTIER_BARE_MIRROR  a mirror of Debian's packages, or a file of apt's sources; this machine's own unless it is set
#   KVTIER_BARE_OUT     a folder of this machine that the commands find as /srv/out, for what they leave behind
set -euo pipefail

PACKAGES=python3,python3-venv,make,git,ca-certificates
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
MIRROR=${KVTIER_BARE_MIRROR:-/etc/apt/sources.list.d/debian.sources}
[[ -n ${KVTIER_BARE_MIRROR:-} || -e $MIRROR ]] || MIRROR=/etc/apt/sources.list
CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
  echo "bare_root: $*" >&2
  exit 3
}

# Refuse, before anything is made, what could not be carried out to its end.
check_machine() {
  ((EUID == 0)) || die "user $(id -un) may not make a root file system: run it as root"
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"
  unshare --mount --pid --fork true 2>/dev/null ||
    die "namespaces are forbidden here: a container needs CAP_SYS_ADMIN (docker run --privileged)"
}

make_root() {
  local root=$1 file
  echo "bare_root: making Debian 12 with $PACKAGES in $root"
  mmdebstrap --quiet --variant=minbase --include="$PACKAGES" bookworm "$root" "$MIRROR" ||
    die "mmdebstrap has failed with packages of $MIRROR: KVTIER_BARE_MIRROR names another place"
  # How packages are reached from here is not what is tested: names of hosts, certificates, indexes of pip.
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  cp /etc/hosts "$root/etc/hosts"
  [[ ! -e $CERTIFICATES ]] || cp "$CERTIFICATES" "$root$CERTIFICATES"
  for file in /etc/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
    [[ ! -e $file ]] || install -D -m 644 "$file" "$root/${file/#$HOME/root}"
  done
  touch "$root/.complete"
}

# Folders on this machine that pip takes wheels from, one a line.
list_wheel_folders() {
  python3 -m pip config list 2>/dev/null | grep -E 'find-links|index-url' | tr " ='\"" '\n' | sed 's,^file://,,' |
    grep '^/' | while read -r folder; do
    [[ ! -d $folder ]] || echo "${folder%/simple}"
  done | sort -u
}

# Runs in namespaces of its own: every mount and every process that a command leaves behind ends with it.
enter_root() {
  local root=$1 folder line
  shift
  while read -r folder; do
    [[ -n $folder ]] || continue
    mkdir -p "$root$folder"
    mount --bind -o ro "$folder" "$root$folder"
  done <<<"$WHEEL_FOLDERS"
  mount -t proc proc "$root/proc"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/dev/shm"
  if [[ -n ${KVTIER_BARE_OUT:-} ]]; then
    mkdir -p "$root/srv/out"
    mount --bind "$KVTIER_BARE_OUT" "$root/srv/out"
  fi
  local environment=(HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  mapfile -t -O "${#environment[@]}" environment < <(env | grep -iE '^(CI|PIP_[A-Z_]+|(http|https|no)_proxy)=' || true)
  for line in "$@"; do
    echo "bare_root: $line"
    chroot "$root" /usr/bin/env -i "${environment[@]}" sh -c "cd /srv/kvtier && $line" </dev/null
  done
}

if [[ ${1:-} == --inside ]]; then
  shift
  enter_root "$@"
  exit
fi

(($#)) || die "no command: scripts/bare_root.sh 'make demo' 'make test'"
check_machine
if [[ -n ${KVTIER_BARE_ROOT:-} ]]; then
  root=$KVTIER_BARE_ROOT
  [[ -e $root/.complete || -z $(ls -A "$root" 2>/dev/null) ]] ||
    die "KVTIER_BARE_ROOT=$root holds something else, or half of a root: name an empty folder"
else
  root=$(mktemp -d /var/tmp/kvtier-bare-XXXXXX)
  trap 'rm -rf --one-file-system "$root"' EXIT
fi
[[ -e $root/.complete ]] || make_root "$root"
rm -rf --one-file-system "$root/srv/kvtier"
[[ -z $(git -C "$CHECKOUT" -c safe.directory='*' status --porcelain) ]] ||
  echo "bare_root: changes that are not committed are not in the clone" >&2
git -c safe.directory='*' clone --quiet --no-hardlinks "$CHECKOUT" "$root/srv/kvtier"
WHEEL_FOLDERS=$(list_wheel_folders) \
  unshare --mount --pid --fork --kill-child "${BASH_SOURCE[0]}" --inside "$root" "$@"
