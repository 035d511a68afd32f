-- The outcomes of the jobs with these ids, without the outcomes that have expired.
SELECT seq, outcome.id, kind, attempt, kept_at, expires_at, CAST(body AS BLOB)
FROM json_each(:ids) CROSS JOIN multiq_outcomes AS outcome ON queue = :queue AND outcome.id = value
WHERE expires_at > :now
