-- The outcomes of these jobs, without the outcomes that have expired.
SELECT json_group_array(seq), count(*)
FROM json_each(:ids) CROSS JOIN multiq_outcomes AS outcome ON queue = :queue AND outcome.id = value
WHERE expires_at > :now
