REPLACE INTO multiq_limits (queue, name, pinned, quota) VALUES ({queue}, {name}, {pinned}, {quota})
