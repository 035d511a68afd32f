-- remove.sql explains the form and the last condition.
DELETE quota FROM multiq_limits AS quota FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = {name} AND pinned >= 0
