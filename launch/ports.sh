#!/usr/bin/env bash
# Where the ranks of one machine meet. Sourced by local.sh and emulate_nodes.sh.

# free_port PYTHON: a TCP port that nobody has. It is below those that kernels give to whoever connects (on Linux
# from 32768, on others from 49152): one of them could be taken before the ranks are there.
free_port() {
    "$1" -c 'import random, socket
ports = list(range(10_000, 32_000))
random.shuffle(ports)
for port in ports:
    with socket.socket() as free:
        try:
            free.bind(("", port))
        except OSError:
            continue
    print(port)
    break'
}
