#!/bin/sh
# Install the Debian packages that are named and missing; where there is no apt, say what is needed and go on.
set -eu
missing=""
for package in "$@"; do
    case "$package" in
        mariadb-server) command -v mariadbd >/dev/null 2>&1 || [ -x /usr/sbin/mariadbd ] || missing="$missing $package" ;;
        postgresql) command -v postgres >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing $package" ;;
        galera-4) [ -e /usr/lib/galera/libgalera_smm.so ] || [ -e /usr/lib64/galera/libgalera_smm.so ] || missing="$missing $package" ;;
        rsync) command -v rsync >/dev/null 2>&1 || missing="$missing $package" ;;
        rabbitmq-server) [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing="$missing $package" ;;
        redis-server) command -v redis-server >/dev/null 2>&1 || missing="$missing $package" ;;
        default-jre-headless) command -v java >/dev/null 2>&1 || [ -n "${JAVA_HOME:-}" ] || missing="$missing $package" ;;
        default-jdk-headless) command -v javac >/dev/null 2>&1 || missing="$missing $package" ;;
        curl) command -v curl >/dev/null 2>&1 || missing="$missing $package" ;;
        chromium) command -v chromium >/dev/null 2>&1 || missing="$missing $package" ;;
        *) dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "lastbit: please install what your system calls:$missing" >&2
    [ -z "${CI:-}" ] || exit 1
    exit 0
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null 2>&1 || { echo "lastbit: please install as root: apt-get install$missing" >&2; exit 1; }
    as_root="sudo"
fi
echo "lastbit: installing$missing" >&2
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq >/dev/null
# Debian would start the server as a system service; the tests start their own, so that is held back.
policy=/usr/sbin/policy-rc.d
held=""
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null && $as_root chmod +x "$policy" && held=1
fi
# shellcheck disable=SC2086  # a list of words is meant
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null || status=$?
[ -z "$held" ] || $as_root rm -f "$policy"
exit "${status:-0}"
