#!/bin/bash
# Restarts replicas one after the other, each when all others are up, so that no request is lost:
#
#   rolling-restart.sh replica1 replica2      # as haproxy.cfg names them; the unit of each is pyspac@NAME
#
# RESTART     command that restarts the replica $1; it returns when the old one has ended. Default: systemctl
# STATUS      HAProxy's page of states
# WAIT_S      how long a replica may take until it is up
set -euo pipefail

RESTART="${RESTART:-systemctl restart pyspac@\$1}"
STATUS="${STATUS:-http://127.0.0.1:8405/stats}"
WAIT_S="${WAIT_S:-600}"
SEEN_S=3 # after so long HAProxy knows of a replica that does not answer: two checks, two per second

(($# > 0)) || { echo "usage: $0 REPLICA..." >&2; exit 2; }

# the replicas that are not up, each with its state
down() {
    curl -fsS "$STATUS;csv" | awk -F, '$1 == "replicas" && $2 != "BACKEND" && $18 !~ /^UP/ { print $2 " is " $18 }'
}

wait_for_all() {
    local end=$((SECONDS + WAIT_S)) missing
    while missing=$(down) && [[ -n $missing ]]; do
        ((SECONDS < end)) || { echo "after $WAIT_S s $missing: stopped before the next restart" >&2; exit 1; }
        sleep 1
    done
}

wait_for_all
for name in "$@"; do
    echo "restarting $name"
    bash -c "$RESTART" restart "$name"
    sleep "$SEEN_S"
    wait_for_all
done
