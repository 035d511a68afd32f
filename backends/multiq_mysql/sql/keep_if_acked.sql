-- Like keep.sql, but for one job. It follows ack_with_ticket.sql directly, in the same packet. It stores the outcome only if
-- that statement has deleted the job and the ticket.
REPLACE INTO multiq_outcomes (queue, id, kind, kept_at, expires_at, attempt, `body`)
SELECT {queue}, {id}, {kind}, {now}, {now} + {keep}, {attempt}, {outcome} FROM DUAL WHERE ROW_COUNT() = 2
