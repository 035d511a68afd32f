-- Deletes outcomes that have not expired. drop_expired.sql deletes the expired ones, because the result of a forget must not
-- count them. ack.sql explains the form.
DELETE outcome FROM multiq_outcomes AS outcome FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND id IN ({ids}) AND expires_at > {now}
