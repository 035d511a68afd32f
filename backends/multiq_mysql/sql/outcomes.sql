SELECT id, kind, attempt, {now} - kept_at, expires_at - {now}, expires_at, body
FROM multiq_outcomes FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND id IN ({ids}) AND expires_at > {now}
