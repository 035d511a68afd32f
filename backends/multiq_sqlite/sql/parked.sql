SELECT name, key, count(*) FROM multiq_gates INDEXED BY multiq_gates_lines
WHERE queue = :queue AND priority IS NOT NULL
GROUP BY 1, 2
