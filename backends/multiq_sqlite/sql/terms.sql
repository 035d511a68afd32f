-- What a held job waits for. The LEFT JOIN also finds a job whose terms another program has deleted. Such a job is
-- malformed.
SELECT seq, awaits, delay FROM multiq_jobs LEFT JOIN multiq_terms USING (seq)
WHERE queue = :queue AND id = :id AND state = 4
