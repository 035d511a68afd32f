-- Notes that multiq may not have written, the lowest seq first. suspects.sql explains why texts are read as bytes.
SELECT seq, CAST(home AS BLOB), typeof(home), CAST(key AS BLOB), typeof(key),
    typeof(version) <> 'integer' OR typeof(expires_at) NOT IN ('integer', 'null')
FROM multiq_notes
WHERE seq > :after AND (
    typeof(home) <> 'text' OR home GLOB '*[^ -~]*'
    OR typeof(key) <> 'text' OR key GLOB '*[^ -~]*'
    OR typeof(version) <> 'integer' OR typeof(expires_at) NOT IN ('integer', 'null')
)
ORDER BY seq
LIMIT :limit
