-- Records that multiq may not have written, the lowest seq first. Texts are read as bytes, because SQLite cannot check
-- whether a text is UTF-8. The caller skips records that are only unusual, such as an id with an umlaut.
SELECT seq,
    CAST(queue AS BLOB), typeof(queue), CAST(id AS BLOB), typeof(id), CAST(reason AS BLOB), typeof(reason),
    iif(typeof(state) = 'integer', state, NULL),
    iif(typeof(priority) = 'integer', priority, NULL),
    iif(typeof(due_at) = 'integer', due_at, NULL),
    iif(typeof(ttr) = 'integer', ttr, NULL),
    iif(typeof(enqueued_at) = 'integer', enqueued_at, NULL),
    iif(typeof(attempt) = 'integer', attempt, NULL),
    iif(typeof(crashes) = 'integer', crashes, NULL),
    iif(typeof(kicks) = 'integer', kicks, NULL),
    typeof(token),
    body IS NOT NULL OR EXISTS (SELECT 1 FROM multiq_bodies WHERE multiq_bodies.seq = job.seq),
    state <> 4 OR EXISTS (
        SELECT 1 FROM multiq_terms
        WHERE multiq_terms.seq = job.seq AND typeof(awaits) = 'integer' AND typeof(delay) = 'integer'
    )
FROM multiq_jobs AS job
WHERE seq > :after AND (
    typeof(queue) <> 'text' OR queue GLOB '*[^ -~]*'
    OR typeof(id) <> 'text' OR id GLOB '*[^ -~]*'
    OR reason IS NOT NULL AND (typeof(reason) <> 'text' OR reason GLOB '*[^ -~]*')
    OR typeof(state) <> 'integer' OR state NOT BETWEEN 0 AND 5
    OR typeof(ttr) <> 'integer' OR ttr NOT BETWEEN 1 AND 3153600000000000000
    OR typeof(attempt) <> 'integer' OR attempt NOT BETWEEN 0 AND 4611686018427387904
    OR typeof(crashes) <> 'integer' OR crashes NOT BETWEEN 0 AND 4611686018427387904
    OR typeof(kicks) <> 'integer' OR kicks NOT BETWEEN 0 AND 4611686018427387904
    OR typeof(priority) <> 'integer' OR typeof(due_at) <> 'integer' OR typeof(enqueued_at) <> 'integer'
    OR typeof(token) NOT IN ('integer', 'null')
    OR body IS NULL AND NOT EXISTS (SELECT 1 FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)
    OR state = 4 AND NOT EXISTS (
        SELECT 1 FROM multiq_terms
        WHERE multiq_terms.seq = job.seq AND typeof(awaits) = 'integer' AND typeof(delay) = 'integer'
    )
)
ORDER BY seq
LIMIT :limit
