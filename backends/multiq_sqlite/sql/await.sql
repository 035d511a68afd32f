UPDATE multiq_terms SET awaits = :awaits WHERE seq = :seq
