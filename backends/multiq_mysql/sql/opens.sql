-- A part of look.sql: the time until a reserve has to check a limit.
COALESCE((SELECT GREATEST(look_at, 0) FROM multiq_gates FORCE INDEX (multiq_gates_look)
              WHERE queue = {queue} AND look_at <= {now} + {horizon} ORDER BY look_at LIMIT 1) - {now}, '-')
