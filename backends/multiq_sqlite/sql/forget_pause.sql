DELETE FROM multiq_queues WHERE CAST(queue AS BLOB) = :queue AND typeof(queue) = :type
