# For scripts that need more than the repository has; they source it from its root.
#
# Nothing is installed unasked: a terminal is asked, CI=true and YES=1 have said yes, and everybody
# else is told what to install. WHAT is the beginning of a sentence: "the tests of the image need".
# shellcheck shell=bash
PATH=$PATH:/usr/sbin:/sbin
missing=() # Debian packages
lacks=()   # what no package brings

# needs PACKAGES COMMAND...: the packages are missing where one of the commands is.
needs() {
  local command
  for command in "${@:2}"; do
    command -v "$command" >/dev/null || { missing+=($1); return; }
  done
}

# lacks_of SCRIPT: what that one lacks.
lacks_of() {
  local said
  said=$("$1" --lacks)
  [[ -z $said ]] || lacks+=("$said")
}

# what_lacks: what cannot be had here, in words, or nothing.
what_lacks() {
  local all=("${lacks[@]}") why="" said
  command -v apt-get >/dev/null || why="there is no apt-get to install them"
  [[ $(id -u) == 0 ]] || why="only root can install them"
  if ((${#missing[@]})) && [[ -n $why ]]; then all+=("${missing[*]} ($why)"); fi
  ((${#all[@]})) || return 0
  printf -v said '%s; ' "${all[@]}"
  printf '%s\n' "${said%; }"
}

# skip_where_lacking WHAT: where something lacks, end with a sentence; in CI that is a failure.
skip_where_lacking() {
  local said
  said=$(what_lacks)
  [[ -n $said ]] || return 0
  if [[ -n ${CI:-} ]]; then
    printf 'failed: %s %s, and CI may not skip it\n' "$1" "$said"
    exit 1
  fi
  printf 'skipped: %s %s\n' "$1" "$said"
  exit 0
}

# install_for WHAT: install what is missing. Says nothing, and changes nothing, where all is there.
install_for() {
  local said
  said=$(what_lacks)
  if [[ -n $said ]]; then
    printf '%s %s\n' "$1" "$said" >&2
    exit 1
  fi
  ((${#missing[@]})) || return 0
  said="$1 Debian packages: ${missing[*]}"
  if [[ -n ${CI:-}${YES:-} ]]; then
    printf '%s. Installing them\n' "$said" >&2
  elif [[ -t 0 ]]; then
    read -r -p "$said. Install them? [y/N] "
    [[ $REPLY == [yY]* ]] || exit 1
  else
    printf '%s. Install them, or say YES=1\n' "$said" >&2
    exit 1
  fi
  install_packages "${missing[@]}"
}

# Debian starts the service of a package that it installs. Both ways of starting (invoke-rc.d and
# deb-systemd-invoke) ask policy-rc.d first; one that is there already is the machine's own.
install_packages() (
  quiet=(-qq -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0)
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update "${quiet[@]}"
  apt-get install -y --no-install-recommends "${quiet[@]}" "$@" >/dev/null
)
