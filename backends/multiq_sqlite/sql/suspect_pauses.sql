SELECT CAST(queue AS BLOB), typeof(queue), typeof(paused_until) FROM multiq_queues
WHERE typeof(queue) <> 'text' OR queue GLOB '*[^ -~]*' OR typeof(paused_until) <> 'integer'
