# Sourced by test_hosts.sh. Makes "hosts" on this machine: network namespaces with names of their own, joined by a
# bridge. The test runs in a "room": network, mount and process namespaces that end with it. So the machine's own
# network stays as it is.

# Prints why there can be no room here, or nothing.
room_missing() {
    local tool said
    [ -e /etc/hosts ] || { echo "no /etc/hosts here"; return; }
    for tool in ip unshare nsenter mpirun; do
        command -v $tool >/dev/null || { echo "no $tool here"; return; }
    done
    said=$("${room[@]}" sh -c 'ip link add v0 type veth peer name v1 && ip link add br0 type bridge' 2>&1) ||
        echo "they are not allowed here: $said"
}

# Sets `room` to the words that, before a command, run it in a room. Users other than root also need a user namespace.
make_room() {
    room=(unshare --net --mount --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" -eq 0 ] || room+=(--user --map-root-user)
}

# Runs this script again in a room and ends with its status. ROOM is a scratch folder for the script in the room. The
# room's processes end with it. If there can be no room here, prints why, as a skipped test, and ends with status 0.
enter_room() {
    local reason
    make_room
    reason=$(room_missing)
    if [ -n "$reason" ]; then echo "skipped: hosts in namespaces: $reason"; skipped=1; finish; exit 0; fi
    tmp=$(mktemp -d)
    trap 'rm -rf "$tmp"' EXIT
    trap '{ kill -KILL $inside; wait $inside; } 2>/dev/null; exit 130' INT TERM HUP
    ROOM=$tmp "${room[@]}" bash "$0" "$@" &
    inside=$!
    wait $inside
    exit $?
}

# ---- Inside the room.

declare -A holder  # the process that holds the namespaces of a host

# Makes the hosts $*, with the addresses 10.77.0.1, 10.77.0.2, ... The kernel gives up a connection to a lost host after
# 5 retransmissions (about 13 s; by default 15 of them, which take 15 minutes).
make_hosts() {
    local host number=0
    ip link set lo up && ip link add br0 type bridge && ip link set br0 up
    echo "127.0.0.1 localhost" >"$ROOM/hosts"
    for host in "$@"; do
        number=$((number + 1))
        unshare --net --uts sleep infinity &
        holder[$host]=$!
        echo ${holder[$host]} >"$ROOM/$host.pid"
        until [ "$(readlink /proc/self/ns/net)" != "$(readlink /proc/${holder[$host]}/ns/net)" ]; do sleep 0.01; done
        ip link add "v-$host" type veth peer name eth0 netns ${holder[$host]}
        ip link set "v-$host" master br0 up
        on "$host" sh -c "hostname $host; ip link set lo up; ip addr add 10.77.0.$number/24 dev eth0
            ip link set eth0 up; echo 5 >/proc/sys/net/ipv4/tcp_retries2"
        echo "10.77.0.$number $host" >>"$ROOM/hosts"
    done
    mount --bind "$ROOM/hosts" /etc/hosts
}

# Runs a command on host $1.
on() {
    local host=$1
    shift
    nsenter -t ${holder[$host]} --net --uts "$@"
}

# Prints the process ids on host $1 of programs named $2.
processes() {
    local p
    for p in /proc/[0-9]*; do
        [ "$(cat "$p/comm" 2>/dev/null)" = "$2" ] &&
            [ "$(readlink "$p/ns/net")" = "$(readlink /proc/${holder[$1]}/ns/net)" ] && echo "${p#/proc/}"
    done
}

# Starts sshd on the hosts $*, with keys made for it, and sets `agent` to the ssh command for mpirun. If that cannot be,
# returns 1 and sets `reason`.
start_sshd() {
    local host sshd line
    sshd=$(command -v sshd || command -v /usr/sbin/sshd) || { reason="no sshd here"; return 1; }
    grep -q ' 4294967295$' /proc/self/uid_map || { reason="this user is not root"; return 1; }
    mount -t tmpfs tmpfs /run && mkdir /run/sshd || { reason="no tmpfs"; return 1; }
    ssh-keygen -q -t ed25519 -N '' -f "$ROOM/host_key" && ssh-keygen -q -t ed25519 -N '' -f "$ROOM/user_key"
    for line in "HostKey $ROOM/host_key" "AuthorizedKeysFile $ROOM/user_key.pub" "StrictModes no" "UsePAM no" \
        "PermitRootLogin yes" "PasswordAuthentication no" "PidFile none"; do echo "$line"; done >"$ROOM/sshd_config"
    for line in "IdentityFile $ROOM/user_key" "UserKnownHostsFile $ROOM/known_hosts" "BatchMode yes" \
        "LogLevel ERROR"; do echo "$line"; done >"$ROOM/ssh_config"
    for host in "$@"; do
        echo "$host $(cut -d' ' -f1,2 "$ROOM/host_key.pub")" >>"$ROOM/known_hosts"
        on "$host" "$sshd" -D -e -f "$ROOM/sshd_config" 2>>"$ROOM/sshd.log" &
    done
    agent="ssh -F $ROOM/ssh_config"
    for _ in $(seq 50); do on "$1" $agent "$2" true 2>"$ROOM/ssh.log" && return; sleep 0.1; done
    reason="ssh to $2 fails: $(cat "$ROOM/ssh.log" "$ROOM/sshd.log" | tail -n 2)"
    return 1
}

# Sets `agent` to a command that enters a host's namespaces, and so needs no sshd.
make_agent() {
    agent=$ROOM/agent
    printf '%s\n' '#!/bin/sh' 'host=$1' 'shift' \
        "exec nsenter -t \"\$(cat \"$ROOM/\$host.pid\")\" --net --uts sh -c \"\$*\"" >"$agent"
    chmod +x "$agent"
}

# Makes the network between the hosts $3... slow: each frame from one host to another takes $1 ms, and $2 percent of
# frames are lost. The kernel's netem does this, or slow_link.c where the kernel has no netem. Sets `shaper` to netem or
# slow_link. fast_network undoes it.
slow_network() {
    local delay=$1 loss=$2 host ports=()
    shift 2
    for host in "$@"; do ports+=("v-$host"); done
    shaper=netem
    for host in "${ports[@]}"; do
        tc qdisc add dev "$host" root netem delay "${delay}ms" loss "$loss%" 2>/dev/null || shaper=slow_link
    done
    [ $shaper = slow_link ] || return 0
    for host in "${ports[@]}"; do ip link set "$host" nomaster; done
    [ -x "$ROOM/slow_link" ] || gcc -O1 -Wall -Wextra -Werror -o "$ROOM/slow_link" dev/test/lib/slow_link.c || return
    rm -f "$ROOM/link.log"
    "$ROOM/slow_link" "$delay" "$loss" "${ports[@]}" >"$ROOM/link.log" &
    link=$!
    until [ -s "$ROOM/link.log" ]; do kill -0 $link || return; sleep 0.01; done
}
fast_network() {
    local host
    [ $shaper = netem ] || { kill $link; wait $link 2>/dev/null; }
    for host in "$@"; do
        if [ $shaper = netem ]; then tc qdisc del dev "v-$host" root; else ip link set "v-$host" master br0; fi
    done
}

# Limits what each of the hosts $* can receive to 100 Mbit/s. Returns 1 if the kernel cannot do that (tbf).
limit_network() {
    local host
    for host in "$@"; do
        tc qdisc add dev "v-$host" root tbf rate 100mbit burst 128kb latency 10s 2>/dev/null || return 1
    done
}
