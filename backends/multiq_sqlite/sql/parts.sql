-- The data of a job outside its row: its body, its memo, whether it has a detail, and the reason why it must not run.
SELECT CAST(body AS BLOB), CAST(memo AS BLOB), detail IS NOT NULL, CAST(doomed AS BLOB)
FROM multiq_bodies LEFT JOIN multiq_memos USING (seq)
WHERE seq = :seq
