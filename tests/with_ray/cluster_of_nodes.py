"""A Ray cluster of this machine, until standard input is closed: prints its address."""

import sys
from typing import Any

from ray.cluster_utils import Cluster

COMMON: dict[str, Any] = {
    "node_ip_address": "127.0.0.2",
    "include_dashboard": False,
    "num_gpus": int(sys.argv[2]),  # to Ray; none has to be there
    "object_store_memory": 128 * 2**20,
}

cluster = Cluster(initialize_head=True, head_node_args={**COMMON, "num_cpus": 1, "node_name": "node1"})
for number in range(2, int(sys.argv[1]) + 1):
    cluster.add_node(**COMMON, num_cpus=4, node_name=f"node{number}")
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
