SELECT CAST(body AS BLOB) FROM multiq_bodies WHERE seq = :seq
