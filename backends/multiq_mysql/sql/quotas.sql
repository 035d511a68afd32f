SELECT name, quota, pinned FROM multiq_limits FORCE INDEX (PRIMARY) WHERE queue = {queue}
