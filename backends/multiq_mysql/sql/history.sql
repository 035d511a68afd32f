-- A page of a history, after the last outcome of the previous page. Expired outcomes are at the other end of the index
-- range, so the statement does not read them. The inner SELECT reads only the index. Without it, a history of a rare kind
-- would read the rows of all other kinds. The driver sorts the rows again.
SELECT outcome.id, kind, attempt, {now} - kept_at, outcome.expires_at - {now}, outcome.expires_at, `body`
FROM (
    SELECT queue, id FROM multiq_outcomes FORCE INDEX (multiq_outcomes_expiry)
    WHERE queue = {queue} AND expires_at > {now} AND kind IN ({kinds})
        AND (expires_at < {expires_at} OR (expires_at = {expires_at} AND id < {id}))
    ORDER BY expires_at DESC, id DESC
    LIMIT {limit}
) AS page STRAIGHT_JOIN multiq_outcomes AS outcome FORCE INDEX (PRIMARY)
ON outcome.queue = page.queue AND outcome.id = page.id
