"""Random walks on beanstalkd against the memory backend, many at once: ``python tests/soak/beanstalk_walks.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from servers.beanstalk import BeanstalkServer
from soak import walks

if __name__ == "__main__":
    walks.main(BeanstalkServer(binlog=True, fsync_ms=None), __doc__, walks=500)
