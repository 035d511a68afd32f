-- Outcomes that multiq may not have written, the lowest seq first. suspects.sql explains why texts are read as bytes.
SELECT seq, CAST(queue AS BLOB), typeof(queue), CAST(id AS BLOB), typeof(id),
    typeof(kind) <> 'integer' OR kind NOT IN (0, 1)
    OR typeof(attempt) <> 'integer' OR typeof(kept_at) <> 'integer' OR typeof(expires_at) <> 'integer'
FROM multiq_outcomes
WHERE seq > :after AND (
    typeof(queue) <> 'text' OR queue GLOB '*[^ -~]*'
    OR typeof(id) <> 'text' OR id GLOB '*[^ -~]*'
    OR typeof(kind) <> 'integer' OR kind NOT IN (0, 1)
    OR typeof(attempt) <> 'integer' OR typeof(kept_at) <> 'integer' OR typeof(expires_at) <> 'integer'
)
ORDER BY seq
LIMIT :limit
