"""Random walks on Redis against the memory backend, many at once: ``python tests/soak/redis_walks.py --walks 2000``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from servers.redis import RedisServer
from soak import walks

if __name__ == "__main__":
    walks.main(RedisServer(appendonly="yes"), __doc__, walks=2000)
